"""Batch order of an epoch, as a pure function of (bucket assignment, seed, epoch).

The order does not depend on the number of ranks or workers: step k on W ranks consumes the next W micro-batches (times
`accumulate`), so a position is one integer and a run resumes on any of them. Rows of a bucket are shuffled and cut into
micro-batches. Neighbours in the order should cost the same, since ranks wait for the slowest micro-batch of their step,
yet be diverse, since one rank sees 64 neighbours one after the other.

So micro-batches are grouped into cost groups: `cost_group` units that cost about the same. A unit is what one rank does
in a step, `accumulate` micro-batches of one bucket. Groups are in random order, and so are their units wherever costs
are within `TOLERANCE`: a group mixes all buckets that cost the same, so with a token budget per batch it mixes
everything. Any W that divides `cost_group` finds whole steps in a group (64 serves 1, 2, 4 … 64 ranks); another W has
some steps across two groups, which is slower but loses nothing. A small set gets smaller groups, since an epoch of a
few groups is not mixed.

Units are sorted by descending cost before groups are cut, so at most one step at the border of two costs is unbalanced.
Nothing is lost: micro-batches that fill no unit are put together by cost, and what fills no group ends the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from frameloom.core.random import bits_at, key, uniform_at

Ints = NDArray[np.int64]
Rows = NDArray[np.int32] | NDArray[np.int64]
Words = NDArray[np.uint64]

COST_GROUP = 64
TOLERANCE = 1.04  # costs that differ by less are the same: ranks that wait a twenty-fifth of a step are fine
_NUM_FALLBACKS = 9  # one of them may be the bad row itself
_MIN_GROUPS = 16
_CHUNK_ROWS = 1_000_000


@dataclass(frozen=True)
class BatchPlan:
    """Micro-batch m has the samples `starts[m]` up to `starts[m + 1]` of the epoch; a sample's index in the epoch is
    its random slot. Their rows lie together in `shuffled` from `firsts[m]` on: the epoch is never written out."""

    epoch: int
    shuffled: Rows
    firsts: Ints
    starts: Ints
    buckets: NDArray[np.int32]
    bounds: Ints  # rows of bucket b lie in `shuffled` from bounds[b] up to bounds[b + 1]
    seed: int

    @property
    def num_microbatches(self) -> int:
        return len(self.buckets)

    @property
    def num_samples(self) -> int:
        return int(self.starts[-1])

    def rows(self, microbatch: int) -> Ints:
        first = int(self.firsts[microbatch])
        size = int(self.starts[microbatch + 1] - self.starts[microbatch])
        return self.shuffled[first : first + size].astype(np.int64)

    def sample_indices(self, microbatch: int) -> Ints:
        """Random slots of the samples of a micro-batch within this epoch."""
        return np.arange(self.starts[microbatch], self.starts[microbatch + 1], dtype=np.int64)

    def fallback_rows(self, microbatch: int) -> Ints:
        """[B, _NUM_FALLBACKS] rows of the same bucket to try in place of a bad one, first come first; a small bucket
        has fewer. They belong to a sample index, so another split of the batch finds the same."""
        bucket = int(self.buckets[microbatch])
        first, size = int(self.bounds[bucket]), int(self.bounds[bucket + 1] - self.bounds[bucket])
        draws = uniform_at(key(self.seed, "replacement", self.epoch), self.sample_indices(microbatch))
        begin = (draws * size).astype(np.int64)
        offsets = (begin[:, None] + np.arange(min(_NUM_FALLBACKS, size))) % size
        rows: Ints = self.shuffled[first + offsets].astype(np.int64)
        return rows

    @property
    def order(self) -> Ints:
        """Rows of the whole epoch in the order of their use, computed at each call."""
        indices = np.arange(self.num_samples, dtype=np.int64)
        indices += np.repeat(self.firsts - self.starts[:-1], np.diff(self.starts))
        return self.shuffled[indices].astype(np.int64)


def plan_epoch(
    assignment: NDArray[np.integer],
    batch_sizes: NDArray[np.int64],
    costs: NDArray[np.float64],
    *,
    seed: int,
    epoch: int,
    accumulate: int = 1,
    cost_group: int = COST_GROUP,
    drop_last: bool = False,
    shown: Ints | None = None,
) -> BatchPlan:
    """Every assigned row once, or as often as it is in `shown`, where a row may come several times or not at all.

    `costs` is per clip of a bucket; `drop_last` leaves out partial micro-batches and the last unit if it is short.

    Units are keyed by (bucket, number of the unit): batch size 16 with `accumulate` 2 and batch size 32 with 1 give
    the same rows in the same order wherever buckets divide evenly.
    """
    has_empty = len(batch_sizes) and batch_sizes.min() < 1
    if min(accumulate, cost_group) < 1 or len(batch_sizes) != len(costs) or has_empty:
        raise ValueError(
            "need accumulate and cost_group >= 1, batch sizes >= 1 and one cost per bucket, "
            f"got {accumulate}, {cost_group}, {batch_sizes}, {costs}"
        )
    kinds = assignment if shown is None else assignment[shown]
    shuffled, counts = _shuffle_within_buckets(kinds, len(batch_sizes), seed, epoch)
    if shown is not None:
        shuffled = shown[shuffled]
    pieces = _cut_microbatches(counts, batch_sizes)
    units, tail = _make_units(pieces, counts // batch_sizes, batch_sizes, costs, accumulate, drop_last)
    ordered = _order_units(units, cost_group, seed, epoch)
    chosen = _members(units, ordered, accumulate)
    if not drop_last:
        chosen = np.concatenate([chosen, tail])
    starts = np.zeros(len(chosen) + 1, dtype=np.int64)
    np.cumsum(pieces.size[chosen], out=starts[1:])
    bounds = np.concatenate([[0], np.cumsum(counts)])
    return BatchPlan(epoch, shuffled, pieces.start[chosen], starts, pieces.bucket[chosen], bounds, seed)


def _shuffle_within_buckets(
    assignment: NDArray[np.integer], num_buckets: int, seed: int, epoch: int
) -> tuple[Rows, Ints]:
    """(indices into `assignment`, bucket after bucket, each in its own keyed order; how many are in each bucket)."""
    # int16 takes numpy's radix sort; grids stay far below 32768 buckets, and larger ones only sort more slowly.
    kinds: NDArray[np.int16] | NDArray[np.int32]
    kinds = assignment.astype(np.int16) if num_buckets < 2**15 else assignment.astype(np.int32)
    counts = np.bincount(kinds[kinds >= 0], minlength=num_buckets).astype(np.int64)
    order = np.argsort(kinds, kind="stable")[len(kinds) - counts.sum() :]
    rows: Rows = order.astype(np.int32) if len(kinds) < 2**31 else order
    del order, kinds
    ends = np.cumsum(counts)
    for bucket in np.flatnonzero(counts):
        part = rows[ends[bucket] - counts[bucket] : ends[bucket]]
        part[:] = part[_argsort_words(_keys_of(part, key(seed, "order", epoch, int(bucket))))[0]]
    return rows, counts


def _keys_of(counters: NDArray[np.integer], base: int) -> Words:
    """`bits_at` in pieces that stay in the processor's cache."""
    words = np.empty(len(counters), dtype=np.uint64)
    for start in range(0, len(counters), _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        words[part] = bits_at(base, counters[part])
    return words


def _argsort_words(words: Words) -> tuple[Ints, Words]:
    """(the indices of `words` in rising order, the sorted words).

    The low bits of a word give way to its index, so sorting values does the work of the far slower sort of indices.
    At 100 million rows 37 random bits are left, and equal ones keep their order.
    """
    mask = np.uint64((1 << max(len(words) - 1, 0).bit_length()) - 1)
    words = words & ~mask
    words |= np.arange(len(words), dtype=np.uint64)
    words.sort()
    return (words & mask).view(np.int64), words


class _Pieces(NamedTuple):
    """All micro-batches, bucket after bucket, as pieces of the shuffled rows; bucket b begins at `offset[b]`."""

    start: Ints
    size: NDArray[np.int32]
    bucket: NDArray[np.int32]
    offset: Ints


def _cut_microbatches(counts: Ints, batch_sizes: Ints) -> _Pieces:
    numbers = -(-counts // batch_sizes)
    offset = np.cumsum(numbers) - numbers
    bucket = np.repeat(np.arange(len(counts), dtype=np.int32), numbers)
    ends = np.cumsum(counts)
    start = np.arange(len(bucket), dtype=np.int64)
    start -= offset[bucket]
    start *= batch_sizes[bucket]
    start += (ends - counts)[bucket]
    size = np.minimum(batch_sizes[bucket], ends[bucket] - start).astype(np.int32)
    return _Pieces(start, size, bucket, offset)


class _Units(NamedTuple):
    """Groups of `accumulate` micro-batches: `numbers[b]` of each bucket, then the mixed ones, spelled out."""

    numbers: Ints
    offset: Ints  # the first micro-batch of each bucket
    costs: NDArray[np.float64]  # of a unit of each bucket
    mixed: Ints  # [unit, accumulate] indices of micro-batches
    mixed_costs: NDArray[np.float64]


def _make_units(
    pieces: _Pieces,
    num_full: Ints,
    batch_sizes: Ints,
    costs: NDArray[np.float64],
    accumulate: int,
    drop_last: bool,
) -> tuple[_Units, Ints]:
    """(units, the last few micro-batches, which fill none); those that fill no unit of their bucket go by cost."""
    numbers = num_full // accumulate
    firsts = pieces.offset + numbers * accumulate
    ends = pieces.offset + num_full if drop_last else np.append(pieces.offset[1:], len(pieces.bucket))
    ranges = [np.arange(first, end) for first, end in zip(firsts, ends, strict=True) if end > first]
    rest = np.concatenate([np.empty(0, dtype=np.int64), *ranges])
    rest_costs = pieces.size[rest] * costs[pieces.bucket[rest]]
    rest = rest[np.argsort(-rest_costs, kind="stable")]
    num_mixed = len(rest) // accumulate
    mixed = rest[: num_mixed * accumulate].reshape(num_mixed, accumulate)
    mixed_costs = (pieces.size[mixed] * costs[pieces.bucket[mixed]]).sum(axis=1)
    units = _Units(numbers, pieces.offset, accumulate * batch_sizes * costs, mixed, mixed_costs)
    return units, rest[num_mixed * accumulate :]


def _order_units(units: _Units, size: int, seed: int, epoch: int) -> Ints:
    """Units in their final order, in cost groups of `size`; a unit is its number, counted bucket after bucket and then
    the mixed ones."""
    num_units = int(units.numbers.sum()) + len(units.mixed)
    while size > 1 and num_units < _MIN_GROUPS * size:
        size //= 2
    ordered = np.empty(num_units, dtype=np.int64)
    keys = np.empty(num_units, dtype=np.uint64)
    done = 0
    for members, words in _cost_classes(units, seed, epoch):
        indices, words = _argsort_words(words)
        ordered[done : done + len(members)] = members[indices]
        keys[done : done + len(members)] = words
        done += len(members)
    num_groups = num_units // size
    # A group's position is that of a random one of its units: groups of a class are spread evenly over the epoch, and
    # where all costs are equal the order of units is as if there were no groups.
    firsts = np.arange(num_groups, dtype=np.int64) * size
    heads = keys[firsts + (bits_at(key(seed, "run place", epoch), firsts) % np.uint64(size)).astype(np.int64)]
    groups = np.argsort(heads, kind="stable")
    ordered[: num_groups * size] = ordered[: num_groups * size].reshape(num_groups, size)[groups].ravel()
    return ordered


def _cost_classes(units: _Units, seed: int, epoch: int) -> Iterator[tuple[Ints, Words]]:
    """(units, a random word for each), one class of equal costs after the other, the most expensive first."""
    num_buckets = len(units.numbers)
    firsts = np.cumsum(units.numbers) - units.numbers
    used = np.flatnonzero(units.numbers)
    mixed = np.arange(len(units.mixed))
    mixed_keys = bits_at(key(seed, "mixed run", epoch), mixed)
    costs = np.concatenate([units.costs[used], units.mixed_costs])
    which = np.concatenate([used, num_buckets + mixed])
    for members in _split_by_cost(costs):
        chosen = which[members]
        buckets, others = chosen[chosen < num_buckets], chosen[chosen >= num_buckets] - num_buckets
        ids = [firsts[b] + np.arange(units.numbers[b]) for b in buckets]
        words = [_keys_of(np.arange(units.numbers[b]), key(seed, "run", epoch, int(b))) for b in buckets]
        yield (
            np.concatenate([*ids, int(units.numbers.sum()) + others]),
            np.concatenate([*words, mixed_keys[others]]),
        )


def _split_by_cost(costs: NDArray[np.float64]) -> Iterator[Ints]:
    """Indices of `costs`, highest first, cut where the next is lower than the first by more than `TOLERANCE`."""
    order = np.argsort(-costs, kind="stable")
    rising = -costs[order]
    start = 0
    while start < len(order):
        end = int(np.searchsorted(rising, rising[start] / TOLERANCE, side="right"))
        yield order[start:end]
        start = end


def _members(units: _Units, ordered: Ints, accumulate: int) -> Ints:
    """Indices of the micro-batches of units, in order."""
    num_own = int(units.numbers.sum())
    firsts = np.cumsum(units.numbers) - units.numbers
    is_own = ordered < num_own
    own = ordered[is_own]
    bucket = np.repeat(np.arange(len(units.numbers), dtype=np.int32), units.numbers)[own]
    members = np.empty((len(ordered), accumulate), dtype=np.int64)
    members[is_own] = (units.offset[bucket] + (own - firsts[bucket]) * accumulate)[:, None] + np.arange(accumulate)
    members[~is_own] = units.mixed[ordered[~is_own] - num_own]
    return members.ravel()
