"""Tokens of a latent, their rotary positions over (frame, row, column), and which of them hold picture.

A third of a head's channels turns with each axis, in this order; within a third, channels (j, j + half) are a pair,
kept as the complex number x + iy. A token at position p turns pair j by p / scale * 10000^(-2j / third).
Complex tables are not rounded by mixed-precision wrappers on the way into a block.

Shape letters: B batch, C channels, F frames, H height or heads, W width, N tokens, D width of a head, P rotary pairs.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.core.errors import ConfigError

THETA = 10_000.0
Grid = tuple[int, int, int]
Scales = tuple[float, float, float]


def token_grid(latent_FHW: tuple[int, int, int], patch_size: int) -> Grid:
    """Tokens along (frames, rows, columns) for a latent of that size."""
    frames, height, width = latent_FHW
    if height % patch_size or width % patch_size or min(latent_FHW) < 1:
        raise ConfigError(
            f"opensora_plan denoiser: a latent of {height}x{width} cells cannot be cut into patches of "
            f"{patch_size}x{patch_size}; choose a resolution whose latent sides are multiples of {patch_size} (with an "
            f"autoencoder of stride 8: pixels that are multiples of {8 * patch_size}; the published training uses 32)"
        )
    return frames, height // patch_size, width // patch_size


def unpack(tokens_BNC: Tensor, grid: Grid, patch_size: int) -> Tensor:
    """Predicted tokens to a latent [B, C, F, H, W]; a token's features run over (row, column, channel) of its patch."""
    frames, rows, columns = grid
    cells = tokens_BNC.reshape(len(tokens_BNC), frames, rows, columns, patch_size, patch_size, -1)
    # [B, F, rows, columns, p, p, C] -> [B, C, F, rows, p, columns, p]
    return cells.permute(0, 6, 1, 2, 4, 3, 5).reshape(len(cells), -1, frames, rows * patch_size, columns * patch_size)


def pool_cells(cells_BFHW: Tensor, patch_size: int) -> Tensor:
    """[B, N], 1 for a token with picture in any of its latent cells, 0 for one that is all padding."""
    return F.max_pool2d(cells_BFHW.float(), patch_size).flatten(1)


def axis_angles(count: int, dim: int, scale: float, device: torch.device | str = "cpu") -> Tensor:
    """Angles [count, dim / 2] along one axis."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    position = torch.arange(count, dtype=torch.float32, device=device) / scale
    return position[:, None] * (1.0 / THETA**exponent)


def rotary_table(grid: Grid, head_dim: int, scales: Scales, device: torch.device | str = "cpu") -> Tensor:
    """Unit complex numbers [N, 1, P]: pairs of the frame first, then of the row, then of the column."""
    dim = head_dim // 3
    axes = [axis_angles(count, dim, scale, device) for count, scale in zip(grid, scales, strict=True)]
    shapes = ((-1, 1, 1), (1, -1, 1), (1, 1, -1))
    spread = [angles.view(*shape, dim // 2).expand(*grid, -1) for angles, shape in zip(axes, shapes, strict=True)]
    angles = torch.cat(spread, dim=-1).flatten(0, 2)
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)


def rotate(heads_BNHD: Tensor, table_N1P: Tensor) -> Tensor:
    """Turn every pair, in float32. Pairs come out side by side: in q and k alike, so their products stay the same."""
    first, second = torch.unflatten(heads_BNHD.float(), -1, (3, 2, -1)).unbind(-2)
    turned = torch.complex(first, second).flatten(-2) * table_N1P
    return torch.view_as_real(turned).flatten(-2)


class RotaryTables:
    """The tables of one model, computed once per shape; the few latest are kept."""

    KEPT = 8

    def __init__(self, head_dim: int, scales: Scales) -> None:
        self._head_dim = head_dim
        self._scales = scales
        self._tables: OrderedDict[tuple[Grid, torch.device], Tensor] = OrderedDict()

    def get(self, grid: Grid, device: torch.device) -> Tensor:
        key = (grid, device)
        if key not in self._tables:
            # A table made while sampling must also serve training, which refuses inference-mode tensors.
            with torch.inference_mode(False):
                self._tables[key] = rotary_table(grid, self._head_dim, self._scales, device)
            if len(self._tables) > self.KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]
