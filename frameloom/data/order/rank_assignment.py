"""Rank assignment: which micro-batches of a step each rank runs.

A step is the next so many micro-batches of the epoch's plan, fewer at its end. Rank r of W takes the r-th, the
(r + W)-th and so on, in rounds: all ranks run forward and backward together, since weights may be gathered in it. Where
a round is not full, the remaining ranks repeat a micro-batch of another rank with zero weight (a filler).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from frameloom.data.order.plan import BatchPlan, Ints


@dataclass(frozen=True)
class RankAssignment:
    """The part of rank `rank` of `num_ranks`; a step has `num_shares` times train.accumulate micro-batches.

    With `kind_of_bucket`, a round holds only one kind, the lowest first. Split models need it where some clips leave
    out blocks that others use: a rank would wait for a gathering that others take no part in. What leaves out blocks
    comes first, so that the last backward pass, which sends the gradients, goes through all of them.
    """

    rank: int = 0
    num_ranks: int = 1
    num_shares: int = 1
    kind_of_bucket: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class PlannedStep:
    """Micro-batches `first` up to `end` of an epoch: what all ranks together take in a step; `names` of the buckets."""

    plan: BatchPlan
    first: int
    end: int
    names: Sequence[str] = ()
    assignment: RankAssignment = RankAssignment()

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def num_samples(self) -> int:
        """As planned; a clip that cannot be read and finds no replacement leaves its slot empty."""
        return int(self.plan.starts[self.end] - self.plan.starts[self.first])

    @property
    def position(self) -> tuple[int, int]:
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
        at = np.arange(starts[0], starts[-1], dtype=np.int64)
        at += np.repeat(self.plan.firsts[self.first : self.end] - starts[:-1], np.diff(starts))
        return self.plan.shuffled[at].astype(np.int64)

    def deal(self) -> tuple[Ints, NDArray[np.bool_]]:
        """[rounds, ranks]: the micro-batch that each rank runs in each round, and which of them are fillers."""
        members, num_ranks = np.arange(self.first, self.end, dtype=np.int64), self.assignment.num_ranks
        kinds = np.zeros(len(members), dtype=np.int64)
        if self.assignment.kind_of_bucket is not None and num_ranks > 1:
            kinds = self.assignment.kind_of_bucket[self.buckets]
        indices, fillers = [], []
        for kind in np.unique(kinds):
            same = members[kinds == kind]
            at = np.arange(-(-len(same) // num_ranks) * num_ranks).reshape(-1, num_ranks)
            indices.append(same[np.minimum(at, len(same) - 1)])
            fillers.append(at >= len(same))
        return np.concatenate(indices), np.concatenate(fillers)

    def of_rank(self) -> list[tuple[int, bool]]:
        """(micro-batch, whether it is a filler) that this rank runs, in order; as many on every rank."""
        if self.assignment.num_ranks == 1:
            return [(index, False) for index in range(self.first, self.end)]
        indices, fillers = (part[:, self.assignment.rank].tolist() for part in self.deal())
        return list(zip(indices, fillers, strict=True))


def plan_steps(
    plan_of_epoch: Callable[[int], BatchPlan],
    assignment: RankAssignment,
    *,
    epoch: int,
    microbatch: int,
    accumulate: int = 1,
    names: Sequence[str] = (),
) -> Iterator[PlannedStep]:
    """Steps without end, from a micro-batch of an epoch on; a plan without micro-batches is passed over."""
    per_step = accumulate * assignment.num_shares
    while True:
        plan = plan_of_epoch(epoch)
        for first in range(microbatch, plan.num_microbatches, per_step):
            yield PlannedStep(plan, first, min(first + per_step, plan.num_microbatches), names, assignment)
        epoch, microbatch = epoch + 1, 0


def find_microbatch(plan: BatchPlan, position: int) -> int | None:
    """The micro-batch that begins after so many samples of an epoch; None when one is cut in two there."""
    found = int(plan.starts.searchsorted(position))
    return found if found < len(plan.starts) and plan.starts[found] == position else None
