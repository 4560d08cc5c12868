"""Golden cases of the Haar transforms alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from frameloom.core.parity import ParityCase, ParityOutput
from frameloom.models.vaes.wfvae.chunking import FrameStream
from frameloom.models.vaes.wfvae.wavelet import HaarJoin2D, HaarJoin3D, HaarSplit2D, HaarSplit3D

TOLERANCE = 3e-6


def matches(case: ParityCase) -> bool:
    return str(case.config.get("cls", "")).startswith("Haar ")


def run(case: ParityCase) -> list[ParityOutput]:
    with torch.no_grad():
        return [_compare(case, name) for name in case.outputs]


def _compare(case: ParityCase, name: str) -> ParityOutput:
    expected = case.outputs[name]
    ours = _compute(case, name)
    note = "" if ours is not None else "an output of a kind that the Haar runner does not know"
    return ParityOutput(name, ours, expected, TOLERANCE, note)


def _compute(case: ParityCase, name: str) -> Tensor | None:
    if name == "filters2d":
        return HaarSplit2D().taps().flatten(1)
    if name == "filters3d":
        return HaarSplit3D().taps().flatten(1)
    source, _, kind = name.rpartition(".")
    if source not in case.inputs or kind not in _KINDS:
        return None
    split, join = _KINDS[kind]
    given = case.inputs[source].float()
    if join is None:
        return split(given)
    # An input that also has a forward result is a picture: the inverse is that of its coefficients.
    is_picture = f"{source}.fwd2d" in case.outputs or f"{source}.fwd3d" in case.outputs
    return join(split(given) if is_picture else given)


def _join_in_pieces(bands_BCFHW: Tensor) -> Tensor:
    """The inverse of one frame, then of two, then of all others."""
    layer, stream = HaarJoin3D(), FrameStream()
    results = []
    for piece in bands_BCFHW.tensor_split((1, 3), dim=2):
        if piece.shape[2]:
            results.append(layer(piece, stream))
            stream.is_first = False
    return torch.cat(results, dim=2)


_Transform = Callable[[Tensor], Tensor]
_KINDS: dict[str, tuple[_Transform, _Transform | None]] = {
    "fwd2d": (HaarSplit2D(), None),
    "fwd3d": (HaarSplit3D(), None),
    "inv2d": (HaarSplit2D(), HaarJoin2D()),
    "inv3d": (HaarSplit3D(), HaarJoin3D()),
    "inv3d_cached_chunks": (HaarSplit3D(), _join_in_pieces),
}
