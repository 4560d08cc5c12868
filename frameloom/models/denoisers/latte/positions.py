"""Positions: fixed sinusoids that are added to tokens, and rotary ones for queries and keys.

Sinusoids of a picture are made for a square of `base_side` patches; any other grid is stretched onto it, so that its
far edge stays where the model knows it. Rotary positions count patches and frames, and are divided by the
interpolation scale and cut to whole numbers: neighbours then share an angle, as in the published code.

Shape letters: F frames, H rows, W columns (of patches), N tokens, D width, P rotary pairs of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from frameloom.models.denoisers.latte.config import LatteConfig
from frameloom.models.layers.rope import grid_positions, rotary_table
from frameloom.models.layers.sinusoids import embed_position


def picture_table(config: LatteConfig, rows: int, columns: int) -> Tensor:
    """[H, W, D]: the first half of the channels tells the column, the second the row."""
    half = config.hidden_size // 2
    row_HD, column_WD = (embed_position(_stretch(config, count), half) for count in (rows, columns))
    return torch.cat([column_WD[None].expand(rows, -1, -1), row_HD[:, None].expand(-1, columns, -1)], dim=-1)


def _stretch(config: LatteConfig, count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32) / (count / config.base_side) / config.scale_2d


def frame_table(config: LatteConfig, frames: int) -> Tensor:
    """[F, D]"""
    return embed_position(torch.arange(frames, dtype=torch.float32) / config.scale_1d, config.hidden_size)


def turn_table(config: LatteConfig, grid: Sequence[int], scale: float) -> Tensor:
    """The rotary table [N, 1, P] of a grid of one or two axes, which share the channels of a head equally."""
    axes = [(torch.arange(count) / scale).long() for count in grid]
    return rotary_table(grid_positions(axes), (config.attention_head_dim // len(axes),) * len(axes))
