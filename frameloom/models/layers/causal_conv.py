"""Causal convolutions along time, and what layers remember between the chunks of a clip.

Shape letters: B batch, C channels, F frames, H height, W width.

A chunk reads what the one before wrote and writes for the one after, never to the same place. So a block that is
recomputed in a backward pass finds what it found the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _triple

from frameloom.models.layers.patches import fold_frames, unfold_frames


class Chunk:
    """Consecutive frames of a clip, and memories of the layers that run on them.

    `leads` says that it begins with the frame that a causal model keeps apart; `is_last`, that nothing follows.
    """

    def __init__(self, before: Chunk | None = None, *, leads: bool, is_last: bool) -> None:
        self.leads = leads
        self.is_last = is_last
        self._read: dict[Hashable, Tensor] = {} if before is None else before._written
        self._written: dict[Hashable, Tensor] = {}

    def recall(self, owner: Hashable) -> Tensor | None:
        """The frames that `owner` kept from the chunk before, or None."""
        # Without gradients nothing is read twice, and each memory can go as soon as it was used.
        return self._read.get(owner) if torch.is_grad_enabled() else self._read.pop(owner, None)

    def keep(self, owner: Hashable, frames_BCFHW: Tensor) -> None:
        # A slice would hold the whole chunk in memory.
        self._written[owner] = frames_BCFHW.clone()

    def align(self, owner: Hashable, branch_BCFHW: Tensor, num_frames: int) -> Tensor:
        """The next `num_frames` of a branch that runs ahead of the main path; the rest waits for the next chunk."""
        waiting = self.recall(owner)
        if waiting is not None:
            branch_BCFHW = join_frames([waiting, branch_BCFHW])
        if branch_BCFHW.shape[2] > num_frames:
            self.keep(owner, branch_BCFHW[:, :, num_frames:])
        return branch_BCFHW[:, :, :num_frames]


def run_in_chunks(
    layers: Callable[[Tensor, Chunk], Tensor], x_BCFHW: Tensor, bounds: Sequence[int], *, leads: bool = True
) -> Tensor:
    """Apply `layers` to the frames between neighbouring `bounds`; `leads` is said of the first chunk."""
    results: list[Tensor] = []
    chunk: Chunk | None = None
    for start, stop in pairwise(bounds):
        chunk = Chunk(chunk, leads=leads and start == 0, is_last=stop == bounds[-1])
        results.append(layers(x_BCFHW[:, :, start:stop], chunk))
    return torch.cat(results, dim=2)


def prepend_past(
    x_BCFHW: Tensor,
    owner: Hashable,
    chunk: Chunk | None,
    *,
    kernel: int,
    stride: int = 1,
    channels_last: bool = False,
) -> Tensor:
    """Put the frames before `x_BCFHW` in front of it, for a causal filter over `kernel` frames.

    At the start of a clip they are copies of its first frame, never zeros. What the filter will need again is kept.
    Without a chunk the whole clip is there at once.
    """
    if kernel == 1:
        return x_BCFHW
    past = chunk.recall(owner) if chunk is not None else None
    if past is None:
        past = x_BCFHW[:, :, :1].expand(-1, -1, kernel - 1, -1, -1)
    joined = join_frames([past, x_BCFHW]) if channels_last else torch.cat([past, x_BCFHW], dim=2)
    if chunk is not None and not chunk.is_last:
        num_steps = (joined.shape[2] - kernel) // stride + 1
        chunk.keep(owner, joined[:, :, num_steps * stride :])
    return joined


def join_frames(pieces_BCFHW: Sequence[Tensor]) -> Tensor:
    """In channels-last order. Given an expanded or sliced tensor, torch.cat alone falls back to channels-first, and
    every layer after it would copy its input."""
    return torch.cat([piece.movedim(1, -1) for piece in pieces_BCFHW], dim=1).movedim(-1, 1)


class CausalConv3d(nn.Module):
    """A convolution that sees the current and earlier frames; padding in space is zeros."""

    channels_last = False
    """whether the model keeps its activations in that order"""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | tuple[int, int, int] = 3,
        *,
        stride: int | tuple[int, int, int] = 1,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        space = _triple(kernel)[-1] // 2 if padding is None else padding
        self.conv = nn.Conv3d(in_channels, out_channels, kernel, stride=stride, padding=(0, space, space))

    def forward(self, x_BCFHW: Tensor, chunk: Chunk | None = None) -> Tensor:
        conv = self.conv
        if conv.kernel_size == (1, 1, 1) and self.channels_last:
            # One matrix product without any copy.
            return F.linear(x_BCFHW.movedim(1, -1), conv.weight.flatten(1), conv.bias).movedim(-1, 1)
        if chunk is None and x_BCFHW.shape[2] == 1 and self.channels_last:
            # All frames under the kernel are copies of the only one, so its taps in time add up to a 2-D kernel.
            image = F.conv2d(fold_frames(x_BCFHW), conv.weight.sum(2), conv.bias, conv.stride[1:], conv.padding[1:])
            return unfold_frames(image, 1)
        sizes = {"kernel": conv.kernel_size[0], "stride": conv.stride[0]}
        result: Tensor = conv(prepend_past(x_BCFHW, self, chunk, **sizes, channels_last=self.channels_last))
        return result
