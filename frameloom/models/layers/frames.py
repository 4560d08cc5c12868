"""Between clips and pictures: frames into the batch and back.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fold_frames(x_BCFHW: Tensor) -> Tensor:
    """Frames into the batch, for layers that treat every frame as an image; one in channels-last order stays so."""
    return x_BCFHW.transpose(1, 2).flatten(0, 1)


def unfold_frames(x: Tensor, num_frames: int) -> Tensor:
    return torch.unflatten(x, 0, (-1, num_frames)).transpose(1, 2)
