"""Published weights into an autoencoder that has the published keys."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from frameloom.models.fit import check_fit
from frameloom.models.vaes.base import VideoVAE


def load_same_keys(model: VideoVAE, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Load a state dict with the keys of `model`, or raise CheckpointError that names what does not fit.

    A model built on the meta device takes the tensors themselves.
    """
    expected = model.state_dict()
    given = dict(tensors)  # once: a lazy mapping reads its file at every look
    check_fit(expected, given, where=where)
    is_meta = any(tensor.is_meta for tensor in expected.values())
    model.load_state_dict(given, assign=is_meta)
    if is_meta:
        model.reset_scaling()
