"""Rank assignment: which micro-batches of a step each rank takes.

A step is the next so many micro-batches of the epoch's plan, fewer at its end. Rank r of W takes the r-th, the
(r + W)-th and so on, in rounds: all ranks run forward and backward together, since weights may be gathered in it. Where
a round is not full, the remaining ranks repeat a micro-batch of another rank with zero weight (a filler).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from frameloom.data.order.plan import BatchPlan, Ints


@dataclass(frozen=True)
class Span:
    """Micro-batches `first` up to `end` of an epoch: what a step takes on all processes together."""

    plan: BatchPlan
    first: int
    end: int
    names: Sequence[str] = ()
    """of the buckets"""

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def num_samples(self) -> int:
        """As planned; a clip that cannot be read and finds no replacement leaves its slot empty."""
        return int(self.plan.starts[self.end] - self.plan.starts[self.first])

    @property
    def after(self) -> tuple[int, int]:
        """(epoch, samples of it that are used) once this step is done."""
        if self.end == self.plan.num_microbatches:
            return self.epoch + 1, 0
        return self.epoch, int(self.plan.starts[self.end])

    @property
    def buckets(self) -> NDArray[np.int32]:
        return self.plan.buckets[self.first : self.end]

    def count_shapes(self) -> dict[str, int]:
        """Micro-batches of each bucket, by name."""
        found, counts = np.unique(self.buckets, return_counts=True)
        return {
            self.names[bucket] if self.names else str(bucket): int(count)
            for bucket, count in zip(found, counts, strict=True)
        }

    def rows(self) -> Ints:
        """Of all its samples, in order."""
        starts = self.plan.starts[self.first : self.end + 1]
        places = np.arange(starts[0], starts[-1], dtype=np.int64)
        places += np.repeat(self.plan.firsts[self.first : self.end] - starts[:-1], np.diff(starts))
        return self.plan.shuffled[places].astype(np.int64)


def iterate_spans(
    plan_of_epoch: Callable[[int], BatchPlan],
    *,
    epoch: int,
    microbatch: int,
    per_step: int,
    names: Sequence[str] = (),
) -> Iterator[Span]:
    """Steps without end, from a micro-batch of an epoch on; a plan without micro-batches is passed over."""
    while True:
        plan = plan_of_epoch(epoch)
        for first in range(microbatch, plan.num_microbatches, per_step):
            yield Span(plan, first, min(first + per_step, plan.num_microbatches), names)
        epoch, microbatch = epoch + 1, 0


def find_microbatch(plan: BatchPlan, position: int) -> int | None:
    """The micro-batch that begins behind so many samples of an epoch; None when one is cut in two there."""
    found = int(plan.starts.searchsorted(position))
    return found if found < len(plan.starts) and plan.starts[found] == position else None


def _deal(members: Ints, num_ranks: int) -> tuple[Ints, NDArray[np.bool_]]:
    num_rounds = -(-len(members) // num_ranks)
    places = np.arange(num_rounds * num_ranks)
    fillers = places >= len(members)
    indices = members[np.minimum(places, len(members) - 1)]
    return indices.reshape(num_rounds, num_ranks), fillers.reshape(num_rounds, num_ranks)


@dataclass(frozen=True)
class Pick:
    """A micro-batch to run; a filler counts for nothing."""

    index: int
    is_filler: bool = False


@dataclass(frozen=True)
class Shares:
    """The part of process `rank` of `num_ranks`; a step has `num_shares` times train.accumulate micro-batches.

    With `kind_of_bucket`, a round holds only one kind, the lowest first. Split models need it where some clips leave
    out blocks that others use: a process would wait for a gathering that its mates do not take part in. What leaves out
    blocks comes first, so that the last backward pass, which sends the gradients, goes through all of them.
    """

    rank: int = 0
    num_ranks: int = 1
    num_shares: int = 1
    kind_of_bucket: NDArray[np.int64] | None = None

    def by_kind(self, kinds: Sequence[int]) -> Shares:
        """The same with the kind of each bucket."""
        return replace(self, kind_of_bucket=np.array(kinds, dtype=np.int64))

    def pick(self, span: Span) -> list[Pick]:
        """What this process runs in a step, in order; as many on every process."""
        if self.num_ranks == 1:
            return [Pick(index) for index in range(span.first, span.end)]
        indices, fillers = self.deal(span)
        return [
            Pick(int(index), bool(filler))
            for index, filler in zip(indices[:, self.rank], fillers[:, self.rank], strict=True)
        ]

    def deal(self, span: Span) -> tuple[Ints, NDArray[np.bool_]]:
        """[rounds, processes]: the micro-batch that each runs in each round, and which of them are fillers."""
        dealt = [_deal(members, self.num_ranks) for members in self._kinds(span)]
        return np.concatenate([part[0] for part in dealt]), np.concatenate([part[1] for part in dealt])

    def _kinds(self, span: Span) -> list[Ints]:
        places = np.arange(span.first, span.end, dtype=np.int64)
        if self.kind_of_bucket is None or self.num_ranks == 1:
            return [places]
        kinds = self.kind_of_bucket[span.buckets]
        return [places[kinds == kind] for kind in np.unique(kinds)]
