"""Positions over (frame, row, column): rotary ones for all tokens, and sinusoids to add to video tokens.

Flux pairs channels (2j, 2j + 1) of a head, Open-Sora 2.0 pairs (j, j + half).

Shape letters: B batch, N video tokens, K text tokens, D width, P rotary pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.models.denoisers.opensora2.config import MMDiTConfig
from frameloom.models.layers.patches import Grid
from frameloom.models.layers.rope import axis_angles, grid_positions, rotary_table


def video_positions(grid: Grid) -> Tensor:
    """[N, 3]: latent frame, patch row and patch column of every token, as float32."""
    return grid_positions([torch.arange(count, dtype=torch.float32) for count in grid])


def joint_positions(grid: Grid, num_text: int) -> Tensor:
    """[K + N, 3]: text first, all at the origin."""
    return F.pad(video_positions(grid), (0, 0, num_text, 0))


def rotary_precision(*, half_split: bool) -> torch.dtype:
    """What angles are computed in, as in the published code of either pairing."""
    return torch.float32 if half_split else torch.float64


def turn_table(config: MMDiTConfig, position_M3: Tensor) -> Tensor:
    """The rotary table [M, 1, P] of tokens at these positions; a batch may stand before M."""
    precision = rotary_precision(half_split=config.use_liger_rope)
    return rotary_table(position_M3, config.axes_dim, config.theta, precision=precision)


def sinusoid_table(position_N3: Tensor, width: int, theta: float) -> Tensor:
    """[N, width]: cosines and sines of every axis, a third of the width each; what is left over stays zero."""
    dim = width // 6 * 2
    angles = [axis_angles(position, dim, theta, precision=torch.float64) for position in position_N3.unbind(-1)]
    table = torch.cat([part for angle in angles for part in (angle.cos(), angle.sin())], dim=-1).float()
    return F.pad(table, (0, width - table.shape[-1]))
