"""Positions over (frame, row, column): rotary ones, as complex numbers, and sinusoids to add to tokens.

A pair of channels (x, y) of a head is the complex number x + iy; a token at position p turns it by the angle
p * theta^(-2j / axis width). Flux pairs channels (2j, 2j + 1), Open-Sora 2.0 pairs (j, j + half).
Complex tables have two merits besides speed: no mixed-precision wrapper rounds them to bf16 on the way into a
block, and both pairings share one rotation, because attention does not see the order of a head's channels.

Shape letters: B batch (1 where all samples share it), N tokens, H heads, P pairs, D width of a head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from frameloom.models.denoisers.opensora2.packing import Grid, joint_positions, video_positions


def axis_angles(position: Tensor, dim: int, theta: float, *, half_split: bool) -> Tensor:
    """Angles [..., dim / 2] along one axis. The pairwise form is computed in float64, the half-split one in float32."""
    precision = torch.float32 if half_split else torch.float64
    exponent = torch.arange(0, dim, 2, dtype=precision, device=position.device) / dim
    return position.to(precision)[..., None] * (1.0 / theta**exponent)


def rotary_table(position_BN3: Tensor, axes_dim: tuple[int, ...], theta: float, *, half_split: bool) -> Tensor:
    """Unit complex numbers [B, N, 1, P] for positions [B, N, 3]."""
    axes = zip(position_BN3.unbind(-1), axes_dim, strict=True)
    angles = torch.cat([axis_angles(position, dim, theta, half_split=half_split) for position, dim in axes], dim=-1)
    return torch.complex(angles.cos().float(), angles.sin().float()).unsqueeze(-2)


def rotate(heads_BNHD: Tensor, table_BN1P: Tensor, *, half_split: bool) -> Tensor:
    """Turn every pair, in float32. Half-split heads come out with their pairs side by side: q and k alike, so
    their products are those of the original order."""
    heads = heads_BNHD.float()
    pairs = (
        torch.complex(*heads.chunk(2, -1)) if half_split else torch.view_as_complex(torch.unflatten(heads, -1, (-1, 2)))
    )
    return torch.view_as_real(pairs * table_BN1P).flatten(-2)


def sinusoid_table(position_N3: Tensor, width: int, theta: float) -> Tensor:
    """[N, width]: cosines and sines of every axis, a third of the width each; what is left over stays zero."""
    dim = width // 6 * 2
    angles = [axis_angles(position, dim, theta, half_split=False) for position in position_N3.unbind(-1)]
    table = torch.cat([part for angle in angles for part in (angle.cos(), angle.sin())], dim=-1).float()
    return torch.nn.functional.pad(table, (0, width - table.shape[-1]))


class PositionTables:
    """The tables of one model, computed once per shape; the few latest are kept."""

    KEPT = 8

    def __init__(self, compute: Callable[[Grid, int, torch.device], Tensor]) -> None:
        self._compute = compute
        self._tables: OrderedDict[tuple[Grid, int, torch.device], Tensor] = OrderedDict()

    def get(self, grid: Grid, num_text: int, device: torch.device) -> Tensor:
        """The table for a video of `grid` tokens behind `num_text` text tokens."""
        key = (grid, num_text, device)
        if key not in self._tables:
            # A table made while sampling must also serve training, which refuses inference-mode tensors.
            with torch.inference_mode(False):
                self._tables[key] = self._compute(*key)
            if len(self._tables) > self.KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]


def rotary_tables(axes_dim: tuple[int, ...], theta: float, *, half_split: bool) -> PositionTables:
    """Tables [1, K + N, 1, P] of all tokens, text first."""

    def compute(grid: Grid, num_text: int, device: torch.device) -> Tensor:
        return rotary_table(joint_positions(grid, num_text, device)[None], axes_dim, theta, half_split=half_split)

    return PositionTables(compute)


def sinusoid_tables(width: int, theta: float) -> PositionTables:
    """Tables [N, D] of the video tokens."""

    def compute(grid: Grid, num_text: int, device: torch.device) -> Tensor:
        return sinusoid_table(video_positions(grid, device), width, theta)

    return PositionTables(compute)
