"""Positions: fixed sinusoids that are added to tokens, and rotary ones for queries and keys.

Sinusoids of a picture are made for a square of `base` patches; any other grid is stretched onto it, so that its
far edge stays where the model knows it. Rotary positions count patches and frames, and are divided by the
interpolation scale and cut to whole numbers: neighbours then share an angle, as in the published code.

Shape letters: N tokens, D width, P rotary pairs of a head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_THETA = 10_000.0


def sinusoids(position_N: Tensor, width: int) -> Tensor:
    """[N, width] in float32: sines, then cosines; computed in float64."""
    exponent = torch.arange(width // 2, dtype=torch.float64, device=position_N.device) / (width / 2)
    angles = position_N.double()[:, None] * _THETA**-exponent
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


def picture_table(rows: int, columns: int, width: int, *, base: int, scale: float, device: torch.device) -> Tensor:
    """[rows * columns, width]: the first half of the channels tells the column, the second the row."""
    row, column = (_stretch(count, base, scale, device) for count in (rows, columns))
    across = sinusoids(column, width // 2)[None].expand(rows, -1, -1)
    down = sinusoids(row, width // 2)[:, None].expand(-1, columns, -1)
    return torch.cat([across, down], dim=-1).flatten(0, 1)


def _stretch(count: int, base: int, scale: float, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.float32, device=device) / (count / base) / scale


def frame_table(frames: int, width: int, *, scale: float, device: torch.device) -> Tensor:
    """[frames, width]"""
    return sinusoids(torch.arange(frames, dtype=torch.float32, device=device) / scale, width)


def rotary_table(positions: Sequence[Tensor], head_dim: int, *, scale: float) -> Tensor:
    """Unit complex numbers [N, P]; the axes share the head's channels equally, one after the other."""
    width = head_dim // len(positions)
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=positions[0].device) / width
    frequency = 1.0 / _THETA**exponent
    angles = [(position / scale).long().float()[:, None] * frequency for position in positions]
    joined = torch.cat(angles, dim=-1)
    return torch.complex(joined.cos(), joined.sin())


def picture_rotary(rows: int, columns: int, head_dim: int, *, scale: float, device: torch.device) -> Tensor:
    """[rows * columns, P]: half of the pairs turn with the row, half with the column."""
    row, column = torch.meshgrid(torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij")
    return rotary_table([row.flatten(), column.flatten()], head_dim, scale=scale)


def frame_rotary(frames: int, head_dim: int, *, scale: float, device: torch.device) -> Tensor:
    return rotary_table([torch.arange(frames, device=device)], head_dim, scale=scale)


def rotate(heads_BHND: Tensor, table_NP: Tensor, *, num_axes: int) -> Tensor:
    """Turn channel pairs (j, j + half) of each axis' part, in float32.

    The channels of a head come out in another order: q and k alike, so their products stay the same.
    """
    parts = torch.unflatten(heads_BHND.float(), -1, (num_axes, 2, -1))
    pairs = torch.complex(parts[..., 0, :], parts[..., 1, :]).flatten(-2)
    return torch.view_as_real(pairs * table_NP).flatten(-2).type_as(heads_BHND)


class Tables:
    """The tables of one model, computed once per shape and device; the latest few are kept."""

    KEPT = 16

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()

    def get(self, compute: Callable[..., Tensor], *sizes: int, device: torch.device, **settings: float) -> Tensor:
        key = (compute.__name__, *sizes, device)
        if key not in self._kept:
            # A table made while sampling must also serve training, which refuses inference-mode tensors.
            with torch.inference_mode(False):
                self._kept[key] = compute(*sizes, device=device, **settings)
            if len(self._kept) > self.KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]
