"""Moving between clips and images, and joining tensors, without leaving channels-last order.

Shape letters: B batch, C channels, F frames, H height, W width.

In memory a clip is (B, F, H, W, C). Joining through that view matters: given an expanded or sliced tensor, torch.cat
falls back to channels-first, and every layer after it then copies its input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fold_frames(x_BCFHW: Tensor) -> Tensor:
    """Frames into the batch, for layers that treat every frame as an image."""
    return x_BCFHW.transpose(1, 2).flatten(0, 1)


def unfold_frames(x: Tensor, num_frames: int) -> Tensor:
    return x.reshape(-1, num_frames, *x.shape[1:]).transpose(1, 2)


def join_frames(pieces_BCFHW: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.movedim(1, -1) for piece in pieces_BCFHW], dim=1).movedim(-1, 1)


def join_channels(pieces_BCFHW: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.movedim(1, -1) for piece in pieces_BCFHW], dim=-1).movedim(-1, 1)
