"""Clips in pieces and tiles, as the published code cuts and blends them.

In time, pieces share one frame; the result of every piece but the first loses its first frame. In space, tiles overlap
by a share of their side and fade into each other.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.models.layers.tiles import Tiles
from frameloom.models.layers.tiling import run_in_spans, run_in_tiles


class Tile(NamedTuple):
    """Largest frames and side of a tile, and the share of the side that neighbours have in common."""

    frames: int
    side: int
    overlap: float

    @property
    def step(self) -> int:
        return int(self.side * (1 - self.overlap))

    @property
    def blend(self) -> int:
        return int(self.side * self.overlap)


@dataclass(frozen=True)
class Tiling:
    """Tiles of pixels for the encoder, and of latents for the decoder. A clip no larger than one stays whole."""

    sample_side: int
    sample_frames: int
    latent_side: int
    latent_frames: int
    overlap: float

    @property
    def pixels(self) -> Tile:
        return Tile(self.sample_frames, self.sample_side, self.overlap)

    @property
    def latents(self) -> Tile:
        return Tile(self.latent_frames, self.latent_side, self.overlap)

    def check(self, strides: tuple[int, int, int]) -> None:
        """ConfigError unless tiles of pixels and of latents fit each other; the published code would cut wrongly."""
        frames, side, _ = strides
        if not 0 <= self.overlap < 1:
            raise ConfigError(f"tiling: overlap is {self.overlap}; choose at least 0 and less than 1")
        if self.sample_frames <= 1 or (self.sample_frames - 1) % frames or self.latent_frames <= 1:
            raise ConfigError(
                f"tiling: pieces of {self.sample_frames} frames and {self.latent_frames} latent frames; the first must "
                f"be 1 more than a multiple of {frames}, and both more than 1"
            )
        if self.sample_side != side * self.latent_side:
            raise ConfigError(
                f"tiling: tiles of {self.sample_side} pixels and {self.latent_side} latents; the first must be {side} "
                "times the second"
            )
        if self.pixels.step < side or self.pixels.step != side * self.latents.step:
            raise ConfigError(
                f"tiling: with overlap {self.overlap}, tiles of {self.sample_side} pixels start every "
                f"{self.pixels.step} pixels and every {self.latents.step} latents; change the overlap so that the "
                f"first is {side} times the second"
            )


# Sizes of the published classes. The pieces in time of encoder and decoder differ from version 1.2 on.
RELEASED: dict[str, Tiling] = {
    "v1.1": Tiling(sample_side=256, sample_frames=65, latent_side=32, latent_frames=17, overlap=0.25),
    "v1.2": Tiling(sample_side=256, sample_frames=33, latent_side=32, latent_frames=16, overlap=0.125),
}


def run_tiled(apply: Callable[[Tensor], Tensor], x_BCFHW: Tensor, source: Tile, result: Tile) -> Tensor:
    """`apply` on pieces and tiles of `source` size; `result` is the size of what it gives for one tile in space.

    A clip that is too large in any one way is cut in all of them, so even a side that one tile would hold gets a
    second tile when it is longer than the step.
    """
    frames, height, width = x_BCFHW.shape[2:]
    if frames <= source.frames and max(height, width) <= source.side:
        return apply(x_BCFHW)
    sides = Tiles(size=source.side, stride=source.step, keep=result.side - result.blend, blend=result.blend)
    shared = source.frames - 1
    # Pieces do not overlap but for the frame they share, so each is kept to its end.
    pieces = Tiles(size=shared, stride=shared, keep=_ALL, blend=0)
    return run_in_spans(lambda piece: run_in_tiles(apply, piece, sides, sides), x_BCFHW, pieces, lead=1)


_ALL = 2**31
