"""Published weights of the Hunyuan autoencoder. Those of Open-Sora 2.0 and of diffusers have the same keys as we."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from frameloom.models.vaes.base import VideoVAE
from frameloom.models.vaes.loading import load_same_keys


def load_original(model: VideoVAE, tensors: Mapping[str, Tensor]) -> None:
    load_same_keys(model, tensors, where="Hunyuan autoencoder weights")
