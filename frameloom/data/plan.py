"""The order of an epoch, computed from (assignment, seed, epoch) alone: a position in it is one integer.

Rows of a bucket are shuffled and cut into runs; a run is `alike` micro-batches of one shape, what one step uses over
all ranks and accumulations. Runs of all buckets are shuffled together. What cannot fill a run is not lost: such
micro-batches are grouped by cost into mixed runs, and the few that are left over end the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from frameloom.core.random import bits_at, key

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class BatchPlan:
    """Micro-batch m uses `order[starts[m]:starts[m + 1]]`; an index into `order` is the sample's random slot."""

    epoch: int
    order: Ints
    starts: Ints
    buckets: NDArray[np.int32]

    @property
    def num_microbatches(self) -> int:
        return len(self.buckets)

    def rows(self, microbatch: int) -> Ints:
        return self.order[self.starts[microbatch] : self.starts[microbatch + 1]]

    def ordinals(self, microbatch: int) -> Ints:
        """Random slots of the samples of a micro-batch within this epoch."""
        return np.arange(self.starts[microbatch], self.starts[microbatch + 1], dtype=np.int64)


class _Microbatches(NamedTuple):
    """Pieces of the array of shuffled rows."""

    start: Ints
    size: Ints
    bucket: Ints

    def take(self, where: Ints) -> _Microbatches:
        return _Microbatches(self.start[where], self.size[where], self.bucket[where])


def plan_epoch(
    assignment: NDArray[np.int32],
    batch_sizes: NDArray[np.int64],
    costs: NDArray[np.float64],
    *,
    seed: int,
    epoch: int,
    alike: int = 1,
    drop_last: bool = False,
) -> BatchPlan:
    """Every assigned row once. `costs` is per clip of a bucket; `drop_last` leaves out partial micro-batches and the
    last group if it is short.

    Runs are keyed by (bucket, number of the run): batch size 16 with `alike` 2 and batch size 32 with `alike` 1 give
    the same rows in the same order wherever buckets divide evenly.
    """
    if alike < 1 or len(batch_sizes) != len(costs) or (len(batch_sizes) and batch_sizes.min() < 1):
        raise ValueError(
            f"need alike >= 1, batch sizes >= 1 and one cost per bucket, got {alike}, {batch_sizes}, {costs}"
        )
    shuffled, counts = _shuffle_within_buckets(assignment, len(batch_sizes), seed, epoch)
    runs, run_keys, rest = _cut_runs(counts, batch_sizes, alike, seed, epoch)
    if drop_last:
        rest = rest.take(np.flatnonzero(rest.size == batch_sizes[rest.bucket]))
    mixed, mixed_keys, tail = _group_by_cost(rest, costs, alike, seed, epoch)
    run_order = np.argsort(np.concatenate([run_keys, mixed_keys]), kind="stable")
    together = _concatenate(runs, mixed)
    used = together.take((run_order[:, None] * alike + np.arange(alike)).ravel())
    if not drop_last:
        used = _concatenate(used, tail)
    return _gather(shuffled, used, epoch)


def _shuffle_within_buckets(
    assignment: NDArray[np.int32], num_buckets: int, seed: int, epoch: int
) -> tuple[Ints, Ints]:
    """(rows, bucket after bucket, each in its own keyed order; rows per bucket)."""
    rows = np.flatnonzero(assignment >= 0)
    # int16 takes numpy's radix sort; grids stay far below 32768 buckets, and larger ones only sort more slowly.
    kinds = assignment[rows].astype(np.int16 if num_buckets < 2**15 else np.int32)
    rows = rows[np.argsort(kinds, kind="stable")]
    counts = np.bincount(kinds, minlength=num_buckets).astype(np.int64)
    ends = np.cumsum(counts)
    for bucket in np.flatnonzero(counts):
        part = rows[ends[bucket] - counts[bucket] : ends[bucket]]
        part[:] = part[np.argsort(bits_at(key(seed, "order", epoch, int(bucket)), part), kind="stable")]
    return rows, counts


def _cut_runs(
    counts: Ints, batch_sizes: Ints, alike: int, seed: int, epoch: int
) -> tuple[_Microbatches, NDArray[np.uint64], _Microbatches]:
    """(micro-batches of full runs, a shuffle key for each run, micro-batches that fill no run)."""
    runs, rest, keys = [_no_microbatches()], [_no_microbatches()], [np.empty(0, dtype=np.uint64)]
    first = np.cumsum(counts) - counts
    for bucket in np.flatnonzero(counts):
        size, count = int(batch_sizes[bucket]), int(counts[bucket])
        starts = np.arange(0, count, size, dtype=np.int64)
        sizes = np.minimum(size, count - starts)
        pieces = _Microbatches(first[bucket] + starts, sizes, np.full(len(starts), bucket, dtype=np.int64))
        num_runs = count // (size * alike)
        runs.append(pieces.take(np.arange(num_runs * alike)))
        rest.append(pieces.take(np.arange(num_runs * alike, len(starts))))
        keys.append(bits_at(key(seed, "run", epoch, int(bucket)), np.arange(num_runs)))
    return _concatenate(*runs), np.concatenate(keys), _concatenate(*rest)


def _group_by_cost(
    rest: _Microbatches, costs: NDArray[np.float64], alike: int, seed: int, epoch: int
) -> tuple[_Microbatches, NDArray[np.uint64], _Microbatches]:
    """(micro-batches of mixed runs, dearest first, a key for each run, the last few that fill no run)."""
    dearest_first = np.argsort(-(rest.size * costs[rest.bucket]), kind="stable")
    num_runs = len(dearest_first) // alike
    keys = bits_at(key(seed, "mixed run", epoch), np.arange(num_runs))
    return rest.take(dearest_first[: num_runs * alike]), keys, rest.take(dearest_first[num_runs * alike :])


def _gather(shuffled: Ints, used: _Microbatches, epoch: int) -> BatchPlan:
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(used.size)])
    source = np.arange(starts[-1], dtype=np.int64)
    source += np.repeat(used.start - starts[:-1], used.size)
    return BatchPlan(epoch, shuffled[source], starts, used.bucket.astype(np.int32))


def _no_microbatches() -> _Microbatches:
    none = np.empty(0, dtype=np.int64)
    return _Microbatches(none, none, none)


def _concatenate(*parts: _Microbatches) -> _Microbatches:
    return _Microbatches(*(np.concatenate(field) for field in zip(*parts, strict=True)))
