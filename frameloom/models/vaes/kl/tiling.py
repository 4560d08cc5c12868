"""Large pictures in overlapping tiles, blended with linear ramps.

Shape letters: N pictures, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OVERLAP = 0.25


def run_in_tiles(
    step: Callable[[Tensor], Tensor], x_NCHW: Tensor, *, tile_cells: int | None, cell_in: int, cell_out: int
) -> Tensor:
    """`step` on tiles; a latent cell is `cell_in` rows and columns of its input and `cell_out` of its result.

    Where a picture fits into one tile, or `tile_cells` is None, `step` sees it whole.
    """
    rows, columns = (side // cell_in for side in x_NCHW.shape[2:])
    if tile_cells is None or max(rows, columns) <= tile_cells:
        return step(x_NCHW)
    places = [(top, left) for top in _cut(rows, tile_cells) for left in _cut(columns, tile_cells)]
    tiles = [step(x_NCHW[:, :, _scale(top, cell_in), _scale(left, cell_in)]) for top, left in places]
    shape = (rows * cell_out, columns * cell_out)
    total = torch.zeros(*tiles[0].shape[:2], *shape, device=x_NCHW.device)
    weight = torch.zeros(shape, device=x_NCHW.device)
    for (top, left), tile in zip(places, tiles, strict=True):
        ramp = _rise(tile.shape[-2], x_NCHW.device)[:, None] * _rise(tile.shape[-1], x_NCHW.device)
        total[:, :, _scale(top, cell_out), _scale(left, cell_out)] += tile * ramp
        weight[_scale(top, cell_out), _scale(left, cell_out)] += ramp
    return (total / weight).to(tiles[0].dtype)


def _cut(length: int, tile: int) -> list[slice]:
    """Tiles that cover `length`; the last one is moved back, so that all are of one size."""
    if length <= tile:
        return [slice(0, length)]
    step = tile - max(1, int(tile * OVERLAP))
    starts = [*range(0, length - tile, step), length - tile]
    return [slice(start, start + tile) for start in starts]


def _scale(cells: slice, factor: int) -> slice:
    return slice(cells.start * factor, cells.stop * factor)


def _rise(length: int, device: torch.device) -> Tensor:
    """Weights that rise from the edges; nowhere zero, because the picture's own edge is in one tile only."""
    index = torch.arange(length, device=device, dtype=torch.float32)
    return ((torch.minimum(index, length - 1 - index) + 0.5) / (length * OVERLAP)).clamp(max=1.0)
