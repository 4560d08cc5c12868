"""Joining tensors without leaving channels-last order.

Shape letters: B batch, C channels, F frames, H height, W width.

In memory a clip is (B, F, H, W, C). Joining through that view matters: given an expanded or sliced tensor, torch.cat
falls back to channels-first, and every layer after it then copies its input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def join_frames(pieces_BCFHW: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.movedim(1, -1) for piece in pieces_BCFHW], dim=1).movedim(-1, 1)


def join_channels(pieces_BCFHW: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.movedim(1, -1) for piece in pieces_BCFHW], dim=-1).movedim(-1, 1)
