"""Rotary positions of the tokens over (frame, row, column), and which of them hold picture.

A third of a head's channels turns with each axis, in this order; within a third, channels (j, j + half) are a pair.
Positions are divided by the interpolation scales.

Shape letters: B batch, F frames, H height, W width, N tokens, P rotary pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.models.layers.patches import Grid
from frameloom.models.layers.rope import grid_positions, rotary_table

NUM_AXES = 3
Scales = tuple[float, float, float]


def turn_table(grid: Grid, head_dim: int, scales: Scales) -> Tensor:
    """The rotary table [N, 1, P] of a grid of tokens."""
    axes = [torch.arange(count, dtype=torch.float32) / scale for count, scale in zip(grid, scales, strict=True)]
    return rotary_table(grid_positions(axes), (head_dim // NUM_AXES,) * NUM_AXES)


def pool_cells(cells_BFHW: Tensor, patch_size: int) -> Tensor:
    """[B, N], 1 for a token with picture in any of its latent cells, 0 for one that is all padding."""
    return F.max_pool2d(cells_BFHW.float(), patch_size).flatten(1)
