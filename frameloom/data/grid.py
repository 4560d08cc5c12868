"""The bucket grid of a recipe: `{resolution: {frames: [probability, batch size]}}`, checked and spelled out.

A probability is one number (the share of fitting clips that stay, the rest go on to the next lower resolution) or,
for videos, a pair (keep, skip): the share `skip` first goes on to the next shorter length of the same resolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frameloom.core.errors import ConfigError
from frameloom.data.resolutions import Size, parse_resolution, size_table

# A clip a little smaller than the budget is scaled up rather than lost.
AREA_TOLERANCE = 0.8


@dataclass(frozen=True)
class Bucket:
    """One shape that batches can have. `index` is its place in the grid and does not depend on batch sizes."""

    index: int
    resolution: str
    frames: int
    ratio: str
    height: int
    width: int
    batch_size: int

    @property
    def name(self) -> str:
        return f"{self.resolution} {self.frames}f {self.ratio}"

    @property
    def num_pixels(self) -> int:
        """Pixels of one clip over all its frames: what a sample costs, up to a factor."""
        return self.frames * self.height * self.width


@dataclass(frozen=True)
class Length:
    """One entry of the grid; `skip` is None unless the recipe gave a pair."""

    frames: int
    keep: float
    skip: float | None
    batch_size: int
    first_bucket: int  # the buckets of the ratios follow each other from here


@dataclass(frozen=True)
class Level:
    """One resolution: its ratios in matching order and its lengths from long to short."""

    resolution: str
    budget: int
    sizes: dict[str, Size]
    lengths: tuple[Length, ...]


@dataclass(frozen=True)
class GridConfig:
    """A checked grid; levels run from most to fewest pixels, the order in which a clip tries them."""

    stride: int
    fps_max: float | None
    levels: tuple[Level, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def batch_sizes(self) -> NDArray[np.int64]:
        return np.array([bucket.batch_size for bucket in self.buckets], dtype=np.int64)

    @cached_property
    def costs(self) -> NDArray[np.float64]:
        """Pixels per clip of each bucket."""
        return np.array([bucket.num_pixels for bucket in self.buckets], dtype=np.float64)

    def geometry(self) -> dict[str, Any]:
        """What decides which pixels a bucket holds, for fingerprints: probabilities and batch sizes do not."""
        shapes = [f"{b.name} {b.height}x{b.width}" for b in self.buckets]
        return {"stride": self.stride, "fps_max": self.fps_max, "buckets": shapes}


def parse_grid(
    raw: Mapping[Any, Any], *, stride: int, fps_max: float | None = None, where: str = "data.buckets"
) -> GridConfig:
    """Check a grid as YAML gives it; ConfigError lists every mistake. `stride` = VAE stride x patch size."""
    problems: list[str] = []
    if not raw:
        raise ConfigError(f"{where} is empty; give at least one resolution, such as {{256px: {{1: [1.0, 8]}}}}")
    if fps_max is not None and not fps_max > 0:
        problems.append(f"{where}: fps_max is {fps_max}; it must be above 0, or null for any frame rate")
    parsed = {str(name): _parse_lengths(lengths, f"{where}.{name}", problems) for name, lengths in raw.items()}
    tables = {name: _parse_sizes(name, stride, where, problems) for name in parsed}
    if problems:
        raise ConfigError(problems)
    levels: list[Level] = []
    buckets: list[Bucket] = []
    for name in sorted(parsed, key=lambda name: parse_resolution(name)[0], reverse=True):
        lengths = tuple(_place(entry, name, tables[name], buckets) for entry in sorted(parsed[name], reverse=True))
        levels.append(Level(name, parse_resolution(name)[0], tables[name], lengths))
    return GridConfig(stride, fps_max, tuple(levels), tuple(buckets))


_Entry = tuple[int, float, float | None, int]  # frames, keep, skip, batch size


def _place(entry: _Entry, resolution: str, sizes: dict[str, Size], buckets: list[Bucket]) -> Length:
    frames, keep, skip, batch_size = entry
    first = len(buckets)
    for i, (ratio, size) in enumerate(sizes.items()):
        buckets.append(Bucket(first + i, resolution, frames, ratio, size.height, size.width, batch_size))
    return Length(frames, keep, skip, batch_size, first)


def _parse_sizes(name: str, stride: int, where: str, problems: list[str]) -> dict[str, Size]:
    try:
        return size_table(name, stride)
    except ConfigError as error:
        problems.extend(f"{where}: {problem}" for problem in error.problems)
        return {}


def _parse_lengths(raw: Any, where: str, problems: list[str]) -> list[_Entry]:
    if not isinstance(raw, Mapping) or not raw:
        problems.append(f"{where} is {raw!r}; it must map numbers of frames to [probability, batch size]")
        return []
    entries: dict[int, _Entry] = {}
    for key, value in raw.items():
        frames = int(key) if str(key).isdecimal() else 0
        if frames < 1:
            problems.append(f"{where}: '{key}' is not a number of frames; write 1 for images, 33 for videos")
        elif frames in entries:
            problems.append(f"{where}: {frames} frames is given twice; keep one")
        else:
            entries[frames] = (frames, *_parse_entry(frames, value, f"{where}.{key}", problems))
    return list(entries.values())


def _parse_entry(frames: int, value: Any, where: str, problems: list[str]) -> tuple[float, float | None, int]:
    wrong = (1.0, None, 1)
    if not isinstance(value, list | tuple) or len(value) != 2:
        problems.append(f"{where} is {value!r}; it must be [probability, batch size], such as [1.0, 8]")
        return wrong
    chance, batch_size = value
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        problems.append(f"{where}: the batch size is {batch_size!r}; it must be a whole number from 1 up")
        return wrong
    chances = list(chance) if isinstance(chance, list | tuple) else [chance]
    if len(chances) not in (1, 2) or not all(_is_share(number) for number in chances):
        problems.append(
            f"{where}: the probability is {chance!r}; it must be from 0 to 1, or a pair [keep, skip] of them"
        )
        return wrong
    if len(chances) == 2 and frames == 1:
        problems.append(f"{where}: images have no shorter length to skip to; give one probability, not {chance!r}")
        return wrong
    return float(chances[0]), float(chances[1]) if len(chances) == 2 else None, batch_size


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
