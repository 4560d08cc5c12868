"""Clips in chunks of frames, with what causal convolutions remember from one chunk to the next.

Shape letters: B batch, C channels, F frames, H height, W width.

A chunk reads what the one before wrote and writes for the one after, never to the same place. So a block that is
recomputed in a backward pass finds what it found the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import torch
from torch import Tensor


class Chunk:
    """What layers may ask about the chunk that they are given.

    `leads` says that it begins with the frame that a causal model keeps apart; `is_last`, that nothing follows.
    """

    def __init__(self, before: Chunk | None, *, leads: bool, is_last: bool) -> None:
        self.leads = leads
        self.is_last = is_last
        self._read: dict[Hashable, Tensor] = {} if before is None else before._written
        self._written: dict[Hashable, Tensor] = {}

    def prepend_past(self, x_BCFHW: Tensor, owner: Hashable, num_frames: int) -> Tensor:
        """`x_BCFHW` behind the `num_frames` that came before it; at the start of a clip, copies of its first frame."""
        # Without gradients nothing is read twice, and each memory can go as soon as it was used.
        past = self._read.get(owner) if torch.is_grad_enabled() else self._read.pop(owner, None)
        if past is None:
            past = x_BCFHW[:, :, :1].expand(-1, -1, num_frames, -1, -1)
        joined = torch.cat([past, x_BCFHW], dim=2)
        if not self.is_last:
            # A slice would hold the whole chunk in memory.
            self._written[owner] = joined[:, :, -num_frames:].clone()
        return joined


Layers = Callable[[Tensor, Chunk], Tensor]


def run_in_chunks(layers: Layers, x_BCFHW: Tensor, bounds: Sequence[int], *, leads: bool) -> Tensor:
    """Apply `layers` to the frames between neighbouring `bounds`; `leads` is said of the first chunk."""
    results: list[Tensor] = []
    chunk: Chunk | None = None
    for start, stop in pairwise(bounds):
        chunk = Chunk(chunk, leads=leads and start == 0, is_last=stop == bounds[-1])
        results.append(layers(x_BCFHW[:, :, start:stop], chunk))
    return torch.cat(results, dim=2)


def bounds_with_rest_first(num_frames: int, size: int) -> list[int]:
    """Chunks of `size`; what is left over goes into the first one."""
    return [0, *range(size + num_frames % size, num_frames, size), num_frames]


def bounds_with_first_alone(num_frames: int, size: int) -> list[int]:
    """The first frame alone, then chunks of `size`; what is left over is the last one."""
    return [0, *range(1, num_frames, size), num_frames]
