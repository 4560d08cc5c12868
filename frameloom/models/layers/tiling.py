"""Large pictures and long clips in overlapping tiles that fade into each other.

Shape letters: B batch, C channels, F frames, H height, W width.

Tiles are made one after the other. What stays in memory is the result so far and, of tiles that a later one fades
over from, the strip that it needs; no tile is kept whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError

Layers = Callable[[Tensor], Tensor]
_FRAMES, _HEIGHT, _WIDTH = 2, 3, 4
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Tiles:
    """Tiles along one side: `size` cells of the input from every `stride`-th on. Of a tile's result the first `keep`
    cells stay, and its first `blend` cells fade over from the last ones of the tile before."""

    size: int
    stride: int
    keep: int
    blend: int

    @classmethod
    def of_pixels(cls, size: int, stride: int, *, compression: int, decoding: bool) -> Tiles:
        """Tiles of `size` pixels or frames every `stride`, in cells of what goes in and what comes out."""
        pixels, cells = (size, stride), (size // compression, stride // compression)
        (size_in, stride_in), (size_out, stride_out) = (cells, pixels) if decoding else (pixels, cells)
        return cls(size=size_in, stride=stride_in, keep=stride_out, blend=size_out - stride_out)

    @classmethod
    def overlapping(cls, size: int, overlap: float, *, compression: int, decoding: bool) -> Tiles:
        """Tiles of `size` pixels or frames that have a share of their side in common, which `check_tile` accepts.

        Their distance is rounded down to whole latent cells. Published code rounds what goes in and what comes out for
        itself; where the two do not fit each other, it stops or gives a clip of another size.
        """
        stride = compression * count_stride_cells(size, overlap, compression=compression)
        return cls.of_pixels(size, stride, compression=compression, decoding=decoding)

    def starts(self, length: int) -> range:
        return range(0, length, self.stride)


@dataclass(frozen=True)
class Cuts:
    """How a batch is cut before layers see it, as far as it is larger than the tiles: clip by clip (`one_by_one`), in
    time, and in `space`, which are tiles along height and width. For `lead` see `run_in_spans`."""

    space: tuple[Tiles, Tiles] | None = None
    time: Tiles | None = None
    lead: int = 0
    one_by_one: bool = False

    def list_pieces(self, shape_FHW: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Frames, height and width of each piece that the layers see of a clip."""
        frames, *sides = shape_FHW
        spans = _list_spans(frames, self.time, self.lead)
        heights, widths = ([side] for side in sides)
        if self.space is not None and any(side > tiles.size for side, tiles in zip(sides, self.space, strict=True)):
            heights, widths = (
                [min(tiles.size, side - start) for start in tiles.starts(side)]
                for side, tiles in zip(sides, self.space, strict=True)
            )
        return list(product(spans, heights, widths))


def _list_spans(frames: int, time: Tiles | None, lead: int) -> list[int]:
    if time is None or frames <= time.size:
        return [frames]
    starts = [start for start in time.starts(frames) if not start or frames - start > lead]
    return [min(time.size + lead, frames - start) for start in starts]


def check_tile(size: int, overlap: float, *, compression: int, where: str) -> None:
    """ConfigError unless tiles of `size` pixels or frames hold whole latent cells, and begin at different ones."""
    if size < compression or size % compression:
        raise ConfigError(f"{where} is {size}; tiles must be multiples of {compression}")
    most = 1 - compression / size
    if not 0 <= overlap < 1 or not count_stride_cells(size, overlap, compression=compression):
        raise ConfigError(
            f"{where} {size} with tile_overlap {overlap}: choose an overlap from 0 to {most:g}, so that tiles begin at "
            f"different latent cells of {compression}"
        )


def count_stride_cells(size: int, overlap: float, *, compression: int) -> int:
    """Whole latent cells from one tile to the next."""
    # 0.9 of 10 cells leaves 0.9999999999999998 of one.
    return int(size // compression * (1 - overlap) + _ROUNDING)


def run_in_cuts(layers: Layers, x_BCFHW: Tensor, cuts: Cuts) -> Tensor:
    """Apply `layers` clip by clip, span by span and tile by tile, as far as a clip is larger than its tiles."""
    space, time = cuts.space, cuts.time
    if cuts.one_by_one and len(x_BCFHW) > 1:
        whole = replace(cuts, one_by_one=False)
        return torch.cat([run_in_cuts(layers, clip, whole) for clip in torch.split(x_BCFHW, 1)])

    def cut_in_space(span_BCFHW: Tensor) -> Tensor:
        sides = span_BCFHW.shape[_HEIGHT:]
        if space is None or all(side <= tiles.size for side, tiles in zip(sides, space, strict=True)):
            return layers(span_BCFHW)
        return run_in_tiles(layers, span_BCFHW, *space)

    if time is None or x_BCFHW.shape[_FRAMES] <= time.size:
        return cut_in_space(x_BCFHW)
    return run_in_spans(cut_in_space, x_BCFHW, time, lead=cuts.lead)


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
