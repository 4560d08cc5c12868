"""Buckets of unequal size over several ranks: equal numbers of rounds, every sample once, no waiting for ever.

Runs of two and three ranks over such buckets are in tests/distributed/test_equivalence.py.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from frameloom.core.random import numpy_stream
from frameloom.data.order.plan import BatchPlan, plan_epoch
from frameloom.data.order.rank_assignment import PlannedStep, RankAssignment

TABLES = 500
WORLDS = (1, 2, 3)


def make_plan(number: int) -> tuple[BatchPlan, list[int]]:
    """A random table: up to six buckets, some with one clip, some with none; and the rows that have a bucket."""
    draw = numpy_stream(number, "bucket table")
    counts = draw.integers(0, 40, int(draw.integers(1, 7)))
    counts[int(draw.integers(len(counts)))] = 1
    assignment = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    sizes = draw.integers(1, 6, len(counts))
    plan = plan_epoch(assignment, sizes, sizes * 1.5, seed=number, epoch=0)
    return plan, list(range(len(assignment)))


def deal(plan: BatchPlan, world: int) -> list[list[list[tuple[int, bool]]]]:
    """For each rank, its micro-batches (and whether they are fillers) in each step."""

    def steps(assignment: RankAssignment) -> list[PlannedStep]:
        firsts = range(0, plan.num_microbatches, world)
        ends = [min(first + world, plan.num_microbatches) for first in firsts]
        return [PlannedStep(plan, *bounds, assignment=assignment) for bounds in zip(firsts, ends, strict=True)]

    return [[step.of_rank() for step in steps(RankAssignment(rank, world, world))] for rank in range(world)]


def find_faults(number: int) -> list[str]:
    plan, rows = make_plan(number)
    found = []
    for world in WORLDS:
        ranks = deal(plan, world)
        if len({tuple(len(step) for step in steps) for steps in ranks}) > 1:
            found.append(f"table {number}, {world} ranks: not as many rounds on all")
        used = Counter(
            int(row)
            for steps in ranks
            for step in steps
            for index, is_filler in step
            if not is_filler
            for row in plan.rows(index)
        )
        if used != Counter(rows):
            found.append(f"table {number}, {world} ranks: samples lost or taken twice")
    return found


def test_random_tables_are_shared_out_evenly(tally):
    for number in range(TABLES):
        tally.inject()
        assert find_faults(number) == []


def test_without_fillers_some_ranks_would_wait_for_a_round_that_never_comes(monkeypatch):
    """The control: the last round is dealt to those alone for whom there is something."""

    def deal_short(self: PlannedStep) -> list[tuple[int, bool]]:
        return [
            (index, False) for index in range(self.first + self.assignment.rank, self.end, self.assignment.num_ranks)
        ]

    monkeypatch.setattr(PlannedStep, "of_rank", deal_short)
    assert any("rounds" in fault for number in range(20) for fault in find_faults(number))


def test_ranks_that_all_take_everything_would_be_noticed(monkeypatch):
    """The control of the count of samples."""
    monkeypatch.setattr(PlannedStep, "of_rank", lambda self: [(index, False) for index in range(self.first, self.end)])
    assert any("twice" in fault for fault in find_faults(3))
