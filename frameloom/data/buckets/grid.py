"""Open-Sora 2.0's buckets: resolutions x ratios x lengths, with probabilities that cascade or a budget of tokens.

A clip tries the resolutions from large to small and, within one, the lengths from long to short; draws decide
where a probability is below 1. `build_grid` makes one from a recipe.

A probability is one number (the share of fitting clips that stay, the rest try the next lower resolution) or,
for videos, a pair (keep, skip): the share `skip` first tries the next shorter length of the same resolution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frameloom.core.resolutions import Size, height_per_width, parse_resolution, size_table
from frameloom.data.buckets.policy import UNUSED, Bucket, BucketPolicy, Clips, Draw, Ints, nearest_values
from frameloom.models.vaes.config import LengthRule

# A clip a little smaller than the budget is scaled up rather than lost.
AREA_TOLERANCE = 0.8


@dataclass(frozen=True)
class Length:
    """One entry of the grid; `skip` is None unless the recipe gave a pair."""

    frames: int
    keep: float
    skip: float | None
    first_bucket: int  # the buckets of the ratios follow each other from here


@dataclass(frozen=True)
class Level:
    """One resolution: its ratios in matching order and its lengths from long to short."""

    resolution: str
    budget: int
    sizes: dict[str, Size]
    lengths: tuple[Length, ...]

    def nearest_ratios(self, clips: Clips, where: Ints) -> Ints:
        """The position of the ratio nearest in height / width; the first wins a tie."""
        return nearest_values([height_per_width(ratio) for ratio in self.sizes], clips.ratio[where])


@dataclass(frozen=True)
class GridPolicy(BucketPolicy):
    """A checked grid; levels run from most to fewest pixels, the order in which a clip tries them."""

    stride: int
    levels: tuple[Level, ...]
    buckets: tuple[Bucket, ...]
    fps_max: float | None = None
    reasons = ("too small", "too short")

    def geometry(self) -> dict[str, Any]:
        return {"stride": self.stride, "fps_max": self.fps_max, "buckets": self.shapes}

    def assign_clips(self, clips: Clips, rows: Ints, draw: Draw) -> NDArray[np.int32]:
        cascade = _Cascade(clips, self.count_frames(clips), rows, draw)
        for level in self.levels:
            cascade.enter(level)
        return cascade.chosen

    def possible_clips(self, clips: Clips) -> Iterator[tuple[Ints, NDArray[np.int32]]]:
        # The cascade with "may" instead of draws: each grid entry with the clips that have a chance to get it.
        frames = self.count_frames(clips)
        reaches = np.ones(len(frames), dtype=bool)  # may come to this level
        for level in self.levels:
            fits = reaches & (clips.area >= AREA_TOLERANCE * level.budget)
            continues = fits & (frames > 1)  # may come to this length
            taken = continues.copy()  # surely gets one of the entries of this level
            for length in level.lengths:
                here = fits & (frames == 1) if length.frames == 1 else continues & (frames >= length.frames)
                skip = length.skip or 0.0
                if skip < 1 and length.keep > 0:
                    where = np.flatnonzero(here)
                    yield where, (length.first_bucket + level.nearest_ratios(clips, where)).astype(np.int32)
                if length.frames == 1:
                    taken |= here & (length.keep >= 1)
                else:
                    taken &= ~(here & (skip < 1) & (length.keep < 1))
                    continues &= ~here | (skip > 0)
            # A video that may run out of lengths is not surely taken.
            reaches &= ~(taken & ~continues)

    def reject_reason(self, clips: Clips) -> NDArray[np.int8]:
        frames = self.count_frames(clips)
        large, long = np.zeros(len(frames), dtype=bool), np.zeros(len(frames), dtype=bool)
        for level in self.levels:
            fits = clips.area >= AREA_TOLERANCE * level.budget
            large |= fits
            for length in level.lengths:
                long |= fits & (frames == 1 if length.frames == 1 else frames >= length.frames)
        return np.where(long, 0, np.where(large, 2, 1)).astype(np.int8)


class _Cascade:
    """Clips on their way through the levels; a row's draws are numbered in the order in which it meets chances."""

    def __init__(self, clips: Clips, frames: Ints, rows: Ints, draw: Draw) -> None:
        self.chosen = np.full(len(rows), UNUSED, dtype=np.int32)
        self._clips, self._frames, self._rows, self._draw = clips, frames, rows, draw
        self._area = clips.area
        self._num_draws = np.zeros(len(rows), dtype=np.int64)

    def enter(self, level: Level) -> None:
        inside = np.flatnonzero((self.chosen == UNUSED) & (self._area >= AREA_TOLERANCE * level.budget))
        images, videos = inside[self._frames[inside] == 1], inside[self._frames[inside] > 1]
        for length in level.lengths:
            if length.frames == 1:
                self._accept(level, length.first_bucket, images[self._draw_for(images) < length.keep])
        if any(length.skip is not None for length in level.lengths):
            self._try_lengths(level, videos)
        else:
            self._take_longest(level, videos)

    def _try_lengths(self, level: Level, videos: Ints) -> None:
        for length in level.lengths:
            if length.frames == 1:
                continue
            fits = self._frames[videos] >= length.frames
            if length.skip is not None:
                fits[fits] = _happens_not(self._draw_for(videos[fits]), length.skip) if length.skip < 1 else False
            staying, videos = videos[fits], videos[~fits]
            if length.keep < 1:
                staying = staying[~_happens_not(self._draw_for(staying), length.keep)]
            self._accept(level, length.first_bucket, staying)

    def _take_longest(self, level: Level, videos: Ints) -> None:
        """The same at once, for lengths without skips: each clip has only the longest that fits."""
        lengths = [length for length in reversed(level.lengths) if length.frames > 1]
        longest = np.searchsorted([length.frames for length in lengths], self._frames[videos], side="right") - 1
        videos, longest = videos[longest >= 0], longest[longest >= 0]
        chance = np.array([length.keep for length in lengths])[longest]
        stays = chance >= 1
        unsure = np.flatnonzero(~stays)
        stays[unsure] = ~_happens_not(self._draw_for(videos[unsure]), chance[unsure])
        first = np.array([length.first_bucket for length in lengths], dtype=np.int64)
        self._accept(level, first[longest[stays]], videos[stays])

    def _draw_for(self, where: Ints) -> NDArray[np.float64]:
        numbers = self._draw(self._rows[where], self._num_draws[where])
        self._num_draws[where] += 1
        return numbers

    def _accept(self, level: Level, first_bucket: int | Ints, where: Ints) -> None:
        self.chosen[where] = first_bucket + level.nearest_ratios(self._clips, where)


def _happens_not(draws: NDArray[np.float64], chance: float | NDArray[np.float64]) -> NDArray[np.bool_]:
    # A chance of 0 must mean never, also for a draw of exactly 0.
    return np.asarray((draws > chance) | (np.asarray(chance) == 0), dtype=bool)


def build_grid(
    buckets: Mapping[str, Mapping[int, Sequence[Any]]], *, stride: int, fps_max: float | None = None
) -> GridPolicy:
    """The policy of `data.buckets`: resolution to frames to [probability, batch size].

    `stride` is the VAE's spatial stride times the patch size. ConfigError for a resolution without sizes there.
    """
    levels: list[Level] = []
    made: list[Bucket] = []
    for name, cells in sorted(buckets.items(), key=lambda item: parse_resolution(item[0])[0], reverse=True):
        sizes = size_table(name, stride)
        lengths = []
        for frames, (chance, batch_size) in sorted(((int(key), cell) for key, cell in cells.items()), reverse=True):
            keep, skip = chance if isinstance(chance, Sequence) else (chance, None)
            lengths.append(Length(frames, float(keep), skip, len(made)))
            for ratio, size in sizes.items():
                made.append(Bucket(len(made), name, frames, ratio, size.height, size.width, batch_size))
        levels.append(Level(name, parse_resolution(name)[0], sizes, tuple(lengths)))
    return GridPolicy(stride, tuple(levels), tuple(made), fps_max)


def apply_token_budget(grid: GridPolicy, tokens: int, rule: LengthRule) -> GridPolicy:
    """The same buckets with as many clips per batch as fit into `tokens`: at least 1, at most the grid's own number.

    Which clip goes where stays as it is, because a bucket's index does not depend on its batch size.
    """
    buckets = tuple(
        dataclasses.replace(
            bucket, batch_size=max(1, min(bucket.batch_size, tokens // count_tokens(bucket, grid.stride, rule)))
        )
        for bucket in grid.buckets
    )
    return dataclasses.replace(grid, buckets=buckets)


def count_tokens(bucket: Bucket, stride: int, rule: LengthRule) -> int:
    """Tokens of one clip; `stride` is pixels per token on a side."""
    in_time = rule.tokens(bucket.frames)
    return in_time * (bucket.height // stride) * (bucket.width // stride)
