"""Published weights of the CogVideoX autoencoder. Those of CogVideoX-Fun and of diffusers have the same keys as we."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from frameloom.models.vaes.base import VideoVAE
from frameloom.models.vaes.loading import load_same_keys


def load_original(model: VideoVAE, tensors: Mapping[str, Tensor]) -> None:
    load_same_keys(model, tensors, where="CogVideoX autoencoder weights")
