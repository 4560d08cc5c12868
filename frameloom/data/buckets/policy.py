"""Buckets and bucket policies: which shape each clip of an epoch gets, for all rows at once.

The plan, the readers and the caches use a policy only through `BucketPolicy` and the functions below. The n-th draw of
a row is a function of (seed, epoch, row, n), so a row's bucket does not depend on the other rows, on workers or on
ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frameloom.core.errors import ConfigError
from frameloom.core.random import key, uniform_at
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.frames import FrameRule, sample_rate

Ints = NDArray[np.int64]
# (rows, number of the draw of each) -> one uniform number in [0, 1) for each row
Draw = Callable[[Ints, Ints], NDArray[np.float64]]

UNUSED = -1
_MAX_DRAWS = 4096  # per row; a policy has far fewer
_CHUNK_ROWS = 1_000_000


@dataclass(frozen=True)
class Bucket:
    """One shape that batches can have. `index` is its position in the policy and does not depend on batch sizes."""

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


class Clips(NamedTuple):
    """The input of a policy: frames of the file, pixels, and frames per second (NaN for an image)."""

    frames: Ints
    height: Ints
    width: Ints
    fps: NDArray[np.float64]

    @property
    def area(self) -> Ints:
        return self.height * self.width

    @property
    def ratio(self) -> NDArray[np.float64]:
        """Height / width."""
        return self.height / self.width

    @property
    def is_image(self) -> NDArray[np.bool_]:
        return np.isnan(self.fps)


class BucketPolicy(ABC):
    """Decides the shape of every clip. Must survive pickling: readers in worker processes hold one."""

    buckets: tuple[Bucket, ...]
    # How frames are spaced in a video; by default spread over `frames * interval` of them.
    frame_rule: FrameRule = FrameRule()
    # Why a clip may not be used; `reject_reason` gives positions in this list plus 1.
    reasons: tuple[str, ...] = ()
    # Settings that give a clip another shape in each epoch, so that no cache of latents can honour them.
    random_keys: Sequence[str] = ()
    # Why a clip that fits may still not be used.
    dropped_by_chance: str = "dropped by chance"
    # Every n-th frame is taken, so that no clip has more frames per second (None: any rate).
    fps_max: float | None = None
    disk_name: ClassVar[str]
    """of the policy in the fingerprint of a cache, whatever the class is called"""

    @cached_property
    def batch_sizes(self) -> Ints:
        return np.array([bucket.batch_size for bucket in self.buckets], dtype=np.int64)

    @cached_property
    def costs(self) -> NDArray[np.float64]:
        """Pixels per clip of each bucket."""
        return np.array([bucket.num_pixels for bucket in self.buckets], dtype=np.float64)

    @property
    def shapes(self) -> list[str]:
        """Every bucket as text, in order."""
        return [f"{bucket.name} {bucket.height}x{bucket.width}" for bucket in self.buckets]

    def geometry(self) -> dict[str, Any]:
        """What decides which pixels a bucket holds, for fingerprints: probabilities and batch sizes do not."""
        return {"policy": self.disk_name, "fps_max": self.fps_max, "buckets": self.shapes}

    @abstractmethod
    def assign_clips(self, clips: Clips, rows: Ints, draw: Draw) -> NDArray[np.int32]:
        """The bucket of each clip, -1 for one that is not used; `draw` is called for rows that need a number."""

    @abstractmethod
    def reject_reason(self, clips: Clips) -> NDArray[np.int8]:
        """0 for a clip that fits a bucket, else 1 + the position of its reason in `reasons`."""

    def intervals(self, fps: NDArray[np.float64]) -> Ints:
        """Frame step in the file per clip, used where `frame_rule` has neither stride nor fps."""
        return sample_rate(fps, self.fps_max)[1]

    def count_frames(self, clips: Clips) -> Ints:
        """Frames of each clip after thinning."""
        return clips.frames // self.intervals(clips.fps)

    def keep_buckets(self, counts: Ints) -> NDArray[np.bool_]:
        """Which buckets are used at all, given the clips that fell into each."""
        return np.ones(len(counts), dtype=bool)

    def possible_clips(self, clips: Clips) -> Iterable[tuple[Ints, NDArray[np.int32]]]:
        """(positions of clips, bucket of each) for all that some epoch may ask for."""

        def draw(rows: Ints, numbers: Ints) -> NDArray[np.float64]:
            raise AssertionError("a policy that draws must say what is possible")

        chosen = self.assign_clips(clips, np.arange(len(clips.frames)), draw)
        where = np.flatnonzero(chosen != UNUSED)
        return [(where, chosen[where])]


def nearest_values(values: Sequence[float], wanted: NDArray[np.float64]) -> Ints:
    """For each number the position of the nearest value; the value that comes first in the list wins a tie."""
    rising, first = np.unique(np.asarray(values, dtype=np.float64), return_index=True)
    above = np.searchsorted(rising, wanted).clip(0, len(rising) - 1)
    below = (above - 1).clip(0)
    gap_below, gap_above = np.abs(rising[below] - wanted), np.abs(rising[above] - wanted)
    takes_below = (gap_below < gap_above) | ((gap_below == gap_above) & (first[below] < first[above]))
    return np.asarray(first[np.where(takes_below, below, above)], dtype=np.int64)


def draw_weighted(weights: Sequence[float], draws: NDArray[np.float64]) -> Ints:
    """A position for each uniform draw in [0, 1), as often as its weight says."""
    edges = np.cumsum(np.asarray(weights, dtype=np.float64))
    edges /= edges[-1]
    return np.searchsorted(edges, draws, side="right").astype(np.int64)


def counter_draw(seed: int, epoch: int) -> Draw:
    """The draws of a run."""
    base = key(seed, "bucket", epoch)
    return lambda rows, numbers: uniform_at(base, rows * _MAX_DRAWS + numbers)


def _read_chunks(manifest: Manifest) -> Iterator[tuple[Ints, Clips]]:
    for start in range(0, len(manifest), _CHUNK_ROWS):
        part = slice(start, min(start + _CHUNK_ROWS, len(manifest)))
        frames, height, width = (
            column[part].astype(np.int64) for column in (manifest.frames, manifest.height, manifest.width)
        )
        clips = Clips(frames, height, width, manifest.fps[part])
        yield np.arange(part.start, part.stop, dtype=np.int64), clips


def assign(manifest: Manifest, policy: BucketPolicy, seed: int, epoch: int) -> NDArray[np.int32]:
    """The bucket index of every row in this epoch, -1 for a row that is not used."""
    draw = counter_draw(seed, epoch)
    chosen = np.empty(len(manifest), dtype=np.int32)
    for rows, clips in _read_chunks(manifest):
        chosen[rows[0] : rows[-1] + 1] = policy.assign_clips(clips, rows, draw)
    left_out = ~policy.keep_buckets(_count(chosen, policy))
    if left_out.any():
        chosen[left_out[chosen] & (chosen != UNUSED)] = UNUSED
    return chosen


def _count(chosen: NDArray[np.int32], policy: BucketPolicy) -> Ints:
    # One more for the unused, so that no copy without them is needed.
    return np.bincount(chosen + 1, minlength=len(policy.buckets) + 1)[1:].astype(np.int64)


class Pairs(NamedTuple):
    """Rows and the buckets they may land in, ordered by bucket and then by row."""

    rows: Ints
    buckets: NDArray[np.int32]


def possible_buckets(manifest: Manifest, policy: BucketPolicy) -> Pairs:
    """Every (row, bucket) that has a chance in some epoch: what a latent cache must hold.

    ConfigError names the settings of a policy that draws shapes, which no cache can hold.
    """
    refuse_random(policy)
    rows: list[Ints] = [np.empty(0, dtype=np.int64)]
    buckets: list[NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
    for chunk, clips in _read_chunks(manifest):
        for where, chosen in policy.possible_clips(clips):
            rows.append(chunk[where])
            buckets.append(chosen)
    all_rows, all_buckets = np.concatenate(rows), np.concatenate(buckets)
    kept = policy.keep_buckets(_count(all_buckets, policy))[all_buckets]
    all_rows, all_buckets = all_rows[kept], all_buckets[kept]
    order = np.lexsort((all_rows, all_buckets))
    return Pairs(all_rows[order], all_buckets[order])


def refuse_random(policy: BucketPolicy) -> None:
    """ConfigError when a latent cache could not honour the policy."""
    problems = [
        f"{name}: true cannot be cached, it gives a clip another shape in each epoch; use false, or no latent cache"
        for name in policy.random_keys
    ]
    if problems:
        raise ConfigError(problems)


class BucketUse(NamedTuple):
    """One line of the bucket table."""

    bucket: Bucket
    num_clips: int
    num_batches: int


def bucket_table(assignment: NDArray[np.int32], policy: BucketPolicy) -> list[BucketUse]:
    """The buckets that are used, in the policy's order; a partial last batch counts as one."""
    return [
        BucketUse(bucket, int(count), -(-int(count) // bucket.batch_size))
        for bucket, count in zip(policy.buckets, _count(assignment, policy), strict=True)
        if count
    ]


def unused_reasons(
    manifest: Manifest, policy: BucketPolicy, assignment: NDArray[np.int32]
) -> tuple[NDArray[np.int8], list[str]]:
    """(a code for each row, the names of the codes).

    The names are "" for a used row, then the reasons of the policy and its `dropped_by_chance`.
    """
    names = ["", *policy.reasons, policy.dropped_by_chance]
    codes = np.zeros(len(assignment), dtype=np.int8)
    for rows, clips in _read_chunks(manifest):
        found = policy.reject_reason(clips)
        unused = assignment[rows] == UNUSED
        codes[rows] = np.where(unused, np.where(found > 0, found, len(names) - 1), 0)
    return codes, names


def count_unused(manifest: Manifest, policy: BucketPolicy, assignment: NDArray[np.int32]) -> dict[str, int]:
    """How many rows are not used this epoch for which reason; the last are those that fit and were drawn out."""
    codes, names = unused_reasons(manifest, policy, assignment)
    counts = np.bincount(codes, minlength=len(names)).tolist()
    return dict(zip(names[1:], counts[1:], strict=True))
