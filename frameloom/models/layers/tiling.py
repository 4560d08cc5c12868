"""Tiled execution: layers run on overlapping tiles of a large clip, whose results are blended.

Shape letters: B batch, C channels, F frames, H height, W width.

Tiles are computed one after the other. What stays in memory is the result so far and, of tiles that a later one fades
over from, the strip that it needs; no tile is kept whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from frameloom.models.layers.tiles import Cuts, Tiles

Layers = Callable[[Tensor], Tensor]
_FRAMES, _HEIGHT, _WIDTH = 2, 3, 4


def run_in_cuts(layers: Layers, x_BCFHW: Tensor, cuts: Cuts) -> Tensor:
    """Apply `layers` to a few clips at a time, span by span and tile by tile, as far as a clip is larger than those."""
    space, time = cuts.space, cuts.time

    def cut_in_space(span_BCFHW: Tensor) -> Tensor:
        sides = span_BCFHW.shape[_HEIGHT:]
        if space is None or all(side <= tiles.size for side, tiles in zip(sides, space, strict=True)):
            return layers(span_BCFHW)
        return run_in_tiles(layers, span_BCFHW, *space)

    results = [
        cut_in_space(clips_BCFHW)
        if time is None or clips_BCFHW.shape[_FRAMES] <= time.size
        else run_in_spans(cut_in_space, clips_BCFHW, time, lead=cuts.lead)
        for clips_BCFHW in torch.split(x_BCFHW, cuts.clips or max(len(x_BCFHW), 1))
    ]
    return torch.cat(results) if len(results) > 1 else results[0]


def run_in_tiles(layers: Layers, x_BCFHW: Tensor, height: Tiles, width: Tiles) -> Tensor:
    """Apply `layers` to tiles in space, row by row; each fades over from the one above, then from the one before it.

    A last tile that is shorter than `blend` fades over from as many of the very last cells of its neighbour, as all
    published models do it, although they lie elsewhere.
    """
    rows: list[Tensor] = []
    above: list[Tensor] = []
    for top in height.starts(x_BCFHW.shape[_HEIGHT]):
        below: list[Tensor] = []
        kept: list[Tensor] = []
        before: Tensor | None = None
        for column, left in enumerate(width.starts(x_BCFHW.shape[_WIDTH])):
            tile = layers(x_BCFHW[..., top : top + height.size, left : left + width.size])
            if above:
                tile = fade(above[column], tile, height.blend, dim=_HEIGHT)
            if before is not None:
                tile = fade(before, tile, width.blend, dim=_WIDTH)
            below.append(_last(tile, height.blend, dim=_HEIGHT))
            before = _last(tile, width.blend, dim=_WIDTH)
            kept.append(tile[..., : height.keep, : width.keep].clone())
        rows.append(torch.cat(kept, dim=_WIDTH))
        above = below
    return torch.cat(rows, dim=_HEIGHT)


def run_in_spans(layers: Layers, x_BCFHW: Tensor, frames: Tiles, *, lead: int = 0) -> Tensor:
    """Apply `layers` to tiles in time.

    With `lead` 1 a tile takes one frame more, which a causal model encodes alone: the first tile keeps its result, the
    others only start from it.
    """
    pieces: list[Tensor] = []
    before: Tensor | None = None
    for start in frames.starts(x_BCFHW.shape[_FRAMES]):
        span = x_BCFHW[:, :, start : start + frames.size + lead]
        if start and span.shape[_FRAMES] <= lead:
            break  # nothing but the frame that would be dropped
        tile = layers(span)
        if before is not None:
            tile = fade(before, tile[:, :, lead:], frames.blend, dim=_FRAMES)
        pieces.append(tile[:, :, : frames.keep + (lead if before is None else 0)].clone())
        before = _last(tile, frames.blend, dim=_FRAMES)
    return torch.cat(pieces, dim=_FRAMES)


def fade(before: Tensor, after: Tensor, extent: int, *, dim: int) -> Tensor:
    """`after` with its first `extent` cells mixed with the last ones of `before`, whose share falls from 1 linearly."""
    extent = min(before.shape[dim], after.shape[dim], extent)
    if not extent:
        return after
    share = torch.arange(extent, dtype=torch.float64) / extent
    shape = [-1 if axis == dim else 1 for axis in range(after.ndim)]
    new, old = (part.to(after.device, torch.float32).view(shape) for part in (share, 1 - share))
    tail = before.narrow(dim, before.shape[dim] - extent, extent)
    mixed = (tail * old + after.narrow(dim, 0, extent) * new).to(after.dtype)
    return torch.cat([mixed, after.narrow(dim, extent, after.shape[dim] - extent)], dim=dim)


def _last(tile: Tensor, extent: int, *, dim: int) -> Tensor:
    """A copy of the last `extent` cells: a view would hold the whole tile in memory."""
    extent = min(extent, tile.shape[dim])
    return tile.narrow(dim, tile.shape[dim] - extent, extent).clone()
