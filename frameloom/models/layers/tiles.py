"""Geometry of overlapping tiles in space and time, without torch; `tiling.py` runs layers on them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from frameloom.core.errors import ConfigError

_ROUNDING = 1e-6


@dataclass(frozen=True)
class Tiles:
    """Tiles along one side: `size` cells of the input from every `stride`-th on. Of a tile's result the first `keep`
    cells stay, and its first `blend` cells fade over from the last ones of the tile before."""

    size: int
    stride: int
    keep: int
    blend: int

    @classmethod
    def overlapping(cls, size: int, overlap: float, *, compression: int, decoding: bool) -> Tiles:
        """Tiles of `size` pixels or frames that have a share of their side in common, which `check_tile` accepts.

        Their distance is rounded down to whole latent cells. Published code rounds what goes in and what comes out for
        itself; where the two do not fit each other, it stops or gives a clip of another size.
        """
        cells = size // compression, count_stride_cells(size, overlap, compression=compression)
        pixels = size, cells[1] * compression
        (size_in, stride_in), (size_out, stride_out) = (cells, pixels) if decoding else (pixels, cells)
        return cls(size=size_in, stride=stride_in, keep=stride_out, blend=size_out - stride_out)

    def starts(self, length: int) -> range:
        return range(0, length, self.stride)


@dataclass(frozen=True)
class Cuts:
    """How a batch is cut before layers see it, as far as it is larger: `clips` at a time, in time, and in space, where
    tiles go along height and width. For `lead` see `run_in_spans`."""

    space: tuple[Tiles, Tiles] | None = None
    time: Tiles | None = None
    lead: int = 0
    clips: int | None = None

    def list_pieces(self, shape_FHW: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Frames, height and width of each piece that the layers see of a clip."""
        frames, *sides = shape_FHW
        spans = [frames]
        if self.time is not None and frames > self.time.size:
            starts = [start for start in self.time.starts(frames) if not start or frames - start > self.lead]
            spans = [min(self.time.size + self.lead, frames - start) for start in starts]
        heights, widths = ([side] for side in sides)
        if self.space is not None and any(side > tiles.size for side, tiles in zip(sides, self.space, strict=True)):
            heights, widths = (
                [min(tiles.size, side - start) for start in tiles.starts(side)]
                for side, tiles in zip(sides, self.space, strict=True)
            )
        return list(product(spans, heights, widths))


def check_tile(size: int, overlap: float, *, compression: int, where: str, exact: bool = False) -> None:
    """ConfigError unless tiles of `size` pixels or frames hold whole latent cells, and begin at different ones.

    `exact`: the overlap must give a whole number of cells from one tile to the next without rounding.
    """
    step = size * (1 - overlap) if 0 <= overlap < 1 else 0.0
    cells = step / compression
    if exact and (size < 1 or size % compression or cells < 1 or abs(cells - round(cells)) > _ROUNDING):
        raise ConfigError(
            f"{where}: tiles of {size} with an overlap of {overlap:g}: a tile and its distance to the next, {step:g}, "
            f"must be multiples of {compression}; for instance {32 * compression} with 0.25"
        )
    if size < compression or size % compression:
        raise ConfigError(f"{where} is {size}; tiles must be multiples of {compression}")
    if cells + _ROUNDING < 1:
        raise ConfigError(
            f"{where} {size} with tile_overlap {overlap}: choose an overlap from 0 to {1 - compression / size:g}, so "
            f"that tiles begin at different latent cells of {compression}"
        )


def count_stride_cells(size: int, overlap: float, *, compression: int) -> int:
    """Whole latent cells from one tile to the next."""
    # 0.9 of 10 cells leaves 0.9999999999999998 of one.
    return int(size // compression * (1 - overlap) + _ROUNDING)
