"""Running a clip through causal layers piece by piece, with the same result as in one piece.

Shape letters: B batch, C channels, F frames, H height, W width.

A layer that looks back keeps its last inputs in a `FrameStream`; a layer that looks ahead (linear interpolation in
time) holds an output back until the next piece, and side branches wait for it. Nothing is computed twice and
nothing is cut off, so every clip length and every piece size is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import pairwise

import torch
from torch import Tensor

from frameloom.models.vaes.wfvae.layout import join_frames


class FrameStream:
    """What the layers remember between the pieces of one clip; made for one run and thrown away after it."""

    def __init__(self) -> None:
        self.is_first = True
        self.is_last = False
        self._kept: dict[Hashable, Tensor] = {}

    def recall(self, owner: Hashable) -> Tensor | None:
        """The frames that `owner` kept from the last piece, or None."""
        return self._kept.pop(owner, None)

    def keep(self, owner: Hashable, frames_BCFHW: Tensor) -> None:
        # A slice would hold the whole piece in memory.
        self._kept[owner] = frames_BCFHW.clone()

    def align(self, owner: Hashable, branch_BCFHW: Tensor, num_frames: int) -> Tensor:
        """The next `num_frames` of a branch that runs ahead of the main path; the rest waits for the next piece."""
        waiting = self.recall(owner)
        if waiting is not None:
            branch_BCFHW = join_frames([waiting, branch_BCFHW])
        if branch_BCFHW.shape[2] > num_frames:
            self.keep(owner, branch_BCFHW[:, :, num_frames:])
        return branch_BCFHW[:, :, :num_frames]


def prepend_past(
    x_BCFHW: Tensor, owner: Hashable, stream: FrameStream | None, *, kernel: int, stride: int = 1
) -> Tensor:
    """Put the frames before `x_BCFHW` in front of it, for a causal filter over `kernel` frames.

    At the start of a clip they are copies of its first frame. What the filter will need again is kept.
    """
    past = stream.recall(owner) if stream is not None else None
    if past is None:
        past = x_BCFHW[:, :, :1].expand(-1, -1, kernel - 1, -1, -1)
    joined = join_frames([past, x_BCFHW])
    if stream is not None and not stream.is_last:
        num_steps = (joined.shape[2] - kernel) // stride + 1
        stream.keep(owner, joined[:, :, num_steps * stride :])
    return joined


def run_in_pieces(
    layers: Callable[[Tensor, FrameStream | None], Tensor], x_BCFHW: Tensor, piece_frames: int | None
) -> Tensor:
    """Apply `layers` to pieces of `piece_frames` (the first has one frame more); None means all at once."""
    num_frames = x_BCFHW.shape[2]
    if piece_frames is None or num_frames <= 1 + piece_frames:
        return layers(x_BCFHW, None)
    stream = FrameStream()
    results = []
    for start, stop in pairwise([0, *range(1 + piece_frames, num_frames, piece_frames), num_frames]):
        stream.is_first, stream.is_last = start == 0, stop == num_frames
        results.append(layers(x_BCFHW[:, :, start:stop], stream))
    return torch.cat(results, dim=2)
