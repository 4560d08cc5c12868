"""Published weights into an autoencoder that has the published keys."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from frameloom.models.fit import load_fitting
from frameloom.models.vaes.base import VideoVAE


def load_same_keys(model: VideoVAE, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Load a state dict with the keys of `model`, or raise CheckpointError that names what does not fit.

    A model built on the meta device takes the tensors themselves, and gets its latent scale anew.
    """
    was_meta = any(parameter.is_meta for parameter in model.parameters())
    load_fitting(model, tensors, where=where)
    if was_meta:
        model.reset_scaling()
