"""Which bucket each clip goes to in an epoch, for all rows at once.

A clip tries the resolutions from large to small and, within one, the lengths from long to short; draws decide
where a probability is below 1. The rule is that of Open-Sora 2.0; the numbers are ours: the n-th draw of a row is
a function of (seed, epoch, row, n), so a row's bucket does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from frameloom.core.random import key, uniform_at
from frameloom.data.grid import AREA_TOLERANCE, Bucket, GridConfig, Length, Level
from frameloom.data.manifest import Manifest
from frameloom.data.resolutions import nearest_ratios

# (rows, how many draws each of them has had) -> one uniform number in [0, 1) for each row
Draw = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]

UNUSED = -1
_MAX_DRAWS = 4096  # per row; a grid has far fewer probabilities
_CHUNK_ROWS = 1_000_000


def sample_rate(fps: NDArray[np.float64], fps_max: float | None) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(frame rate after thinning, every how many frames one is taken); an image (NaN) has rate 0 and interval 1."""
    image = np.isnan(fps)
    known = np.where(image, 0.0, fps)
    if fps_max is None:
        return known, np.ones(len(fps), dtype=np.int64)
    fast = known >= fps_max
    interval = np.where(fast, np.ceil(known / fps_max), 1).astype(np.int64)
    return np.where(fast, np.floor(known / interval), known), interval


def counter_draw(seed: int, epoch: int) -> Draw:
    """The draws of a run."""
    base = key(seed, "bucket", epoch)
    return lambda rows, numbers: uniform_at(base, rows * _MAX_DRAWS + numbers)


def assign(manifest: Manifest, grid: GridConfig, seed: int, epoch: int) -> NDArray[np.int32]:
    """The bucket index of every row in this epoch, -1 for a row that is not used."""
    draw = counter_draw(seed, epoch)
    chosen = np.empty(len(manifest), dtype=np.int32)
    for start in range(0, len(manifest), _CHUNK_ROWS):
        rows = np.arange(start, min(start + _CHUNK_ROWS, len(manifest)), dtype=np.int64)
        chosen[rows] = assign_clips(grid, _clips(manifest, grid, rows), rows, draw)
    return chosen


class Clips(NamedTuple):
    """What the cascade looks at; `frames` counts after thinning to the maximal frame rate."""

    frames: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]

    @property
    def area(self) -> NDArray[np.int64]:
        return self.height * self.width


def thin_clips(
    frames: NDArray[np.integer],
    height: NDArray[np.integer],
    width: NDArray[np.integer],
    fps: NDArray[np.float64],
    fps_max: float | None,
) -> Clips:
    _, interval = sample_rate(fps, fps_max)
    return Clips(frames.astype(np.int64) // interval, height.astype(np.int64), width.astype(np.int64))


def _clips(manifest: Manifest, grid: GridConfig, rows: NDArray[np.int64]) -> Clips:
    part = slice(int(rows[0]), int(rows[-1]) + 1)
    fields = (manifest.frames[part], manifest.height[part], manifest.width[part], manifest.fps[part])
    return thin_clips(*fields, grid.fps_max)


def assign_clips(grid: GridConfig, clips: Clips, rows: NDArray[np.int64], draw: Draw) -> NDArray[np.int32]:
    """The cascade itself; `draw` is asked for the rows that need a number, each with its count of draws so far."""
    chosen = np.full(len(rows), UNUSED, dtype=np.int32)
    num_draws = np.zeros(len(rows), dtype=np.int64)
    area = clips.area

    def draw_for(where: NDArray[np.int64]) -> NDArray[np.float64]:
        numbers = draw(rows[where], num_draws[where])
        num_draws[where] += 1
        return numbers

    def accept(level: Level, length: Length, where: NDArray[np.int64]) -> None:
        chosen[where] = _bucket_of(level, length, clips, where)

    for level in grid.levels:
        inside = np.flatnonzero((chosen == UNUSED) & (area >= AREA_TOLERANCE * level.budget))
        videos = inside[clips.frames[inside] > 1]
        for length in level.lengths:
            if length.frames == 1:
                images = inside[clips.frames[inside] == 1]
                accept(level, length, images[draw_for(images) < length.keep])
                continue
            fits = clips.frames[videos] >= length.frames
            if length.skip is not None:
                fits[fits] = _happens_not(draw_for(videos[fits]), length.skip) if length.skip < 1 else False
            staying, videos = videos[fits], videos[~fits]
            if length.keep < 1:
                staying = staying[~_happens_not(draw_for(staying), length.keep)]
            accept(level, length, staying)
    return chosen


def _happens_not(draws: NDArray[np.float64], chance: float) -> NDArray[np.bool_]:
    # A chance of 0 must mean never, also for a draw of exactly 0.
    return (draws > chance) | (chance == 0)


def _bucket_of(level: Level, length: Length, clips: Clips, where: NDArray[np.int64]) -> NDArray[np.int64]:
    return length.first_bucket + nearest_ratios(level.sizes, clips.height[where], clips.width[where])


class Pairs(NamedTuple):
    """Rows and the buckets they may land in, ordered by bucket and then by row."""

    rows: NDArray[np.int64]
    buckets: NDArray[np.int32]


def possible_buckets(manifest: Manifest, grid: GridConfig) -> Pairs:
    """Every (row, bucket) that has a chance in some epoch: what a latent cache must hold."""
    rows: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    buckets: list[NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
    for start in range(0, len(manifest), _CHUNK_ROWS):
        chunk = np.arange(start, min(start + _CHUNK_ROWS, len(manifest)), dtype=np.int64)
        clips = _clips(manifest, grid, chunk)
        for level, length, where in _reachable(grid, clips):
            rows.append(chunk[where])
            buckets.append(_bucket_of(level, length, clips, where).astype(np.int32))
    all_rows, all_buckets = np.concatenate(rows), np.concatenate(buckets)
    order = np.lexsort((all_rows, all_buckets))
    return Pairs(all_rows[order], all_buckets[order])


def _reachable(grid: GridConfig, clips: Clips) -> list[tuple[Level, Length, NDArray[np.int64]]]:
    """The cascade with "may" instead of draws: each grid entry with the clips that have a chance to get it."""
    found = []
    reaches = np.ones(len(clips.frames), dtype=bool)  # may come to the level at hand
    for level in grid.levels:
        fits = reaches & (clips.area >= AREA_TOLERANCE * level.budget)
        goes_on = fits & (clips.frames > 1)  # may come to the length at hand
        taken = goes_on.copy()  # surely gets one of the entries of this level
        for length in level.lengths:
            here = fits & (clips.frames == 1) if length.frames == 1 else goes_on & (clips.frames >= length.frames)
            skip = length.skip or 0.0
            if skip < 1 and length.keep > 0:
                found.append((level, length, np.flatnonzero(here)))
            if length.frames == 1:
                taken |= here & (length.keep >= 1)
            else:
                taken &= ~(here & (skip < 1) & (length.keep < 1))
                goes_on &= ~here | (skip > 0)
        # A video that may run out of lengths is not surely taken.
        reaches &= ~(taken & ~goes_on)
    return found


class BucketUse(NamedTuple):
    """One line of the bucket table."""

    bucket: Bucket
    num_clips: int
    num_batches: int


def bucket_table(assignment: NDArray[np.int32], grid: GridConfig) -> list[BucketUse]:
    """The buckets that are used, in grid order; a partial last batch counts as one."""
    counts = np.bincount(assignment[assignment != UNUSED], minlength=len(grid.buckets))
    return [
        BucketUse(bucket, int(count), -(-int(count) // bucket.batch_size))
        for bucket, count in zip(grid.buckets, counts, strict=True)
        if count
    ]


def count_unused(manifest: Manifest, grid: GridConfig, assignment: NDArray[np.int32]) -> dict[str, int]:
    """Why rows are not used this epoch: `too small` for every resolution, `too short` for every length, `unlucky`."""
    counts = {"too small": 0, "too short": 0, "unlucky": 0}
    for start in range(0, len(manifest), _CHUNK_ROWS):
        rows = np.arange(start, min(start + _CHUNK_ROWS, len(manifest)), dtype=np.int64)
        clips = _clips(manifest, grid, rows)
        unused = assignment[rows] == UNUSED
        large, long = np.zeros_like(unused), np.zeros_like(unused)
        for level in grid.levels:
            fits = clips.area >= AREA_TOLERANCE * level.budget
            large |= fits
            for length in level.lengths:
                long |= fits & (clips.frames == 1 if length.frames == 1 else clips.frames >= length.frames)
        counts["too small"] += int((unused & ~large).sum())
        counts["too short"] += int((unused & large & ~long).sum())
        counts["unlucky"] += int((unused & long).sum())
    return counts
