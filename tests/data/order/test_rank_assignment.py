"""Who takes which micro-batch: every one once, equally many rounds for all, the same samples for any number."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from frameloom.core.random import numpy_stream
from frameloom.data.order.plan import BatchPlan, plan_epoch
from frameloom.data.order.rank_assignment import PlannedStep, RankAssignment, find_microbatch, plan_steps

SIZES, COSTS = np.array([4, 2, 3]), np.array([1.0, 2.0, 5.0])
KINDS = np.array([0, 1, 1])


def make_plan(seed: int, epoch: int = 0, num_rows: int = 100) -> BatchPlan:
    assignment = numpy_stream(seed, "rows").integers(-1, 3, num_rows).astype(np.int32)
    return plan_epoch(assignment, SIZES, COSTS, seed=seed, epoch=epoch)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("kinds", [None, KINDS])
def test_each_micro_batch_is_run_once_and_all_take_as_many_rounds(world, kinds):
    for seed in range(10):
        plan = make_plan(seed)
        for first in range(0, plan.num_microbatches, world):
            step = PlannedStep(plan, first, min(first + world, plan.num_microbatches))
            ranks = [replace(step, assignment=RankAssignment(rank, world, world, kinds)) for rank in range(world)]
            dealt = [one.of_rank() for one in ranks]
            assert len({len(own) for own in dealt}) == 1
            run = sorted(index for own in dealt for index, is_filler in own if not is_filler)
            assert run == list(range(step.first, step.end))
            # No rank is given its own micro-batch again as a filler.
            assert all(len({index for index, _ in own}) == len(own) for own in dealt if world > 1)


def test_a_round_holds_one_kind_and_the_lowest_comes_first():
    plan = make_plan(1)
    mixed = 0
    for first in range(0, plan.num_microbatches - 8, 8):
        plain = PlannedStep(plan, first, first + 8, assignment=RankAssignment(0, 4, 8))
        found = KINDS[plan.buckets[replace(plain, assignment=RankAssignment(0, 4, 8, KINDS)).deal()[0]]]
        assert (found == found[:, :1]).all() and (np.diff(found[:, 0]) >= 0).all()
        kinds = KINDS[plan.buckets[plain.deal()[0]]]
        mixed += int((kinds != kinds[:, :1]).any())
    assert mixed, "without kinds no round was mixed: the test proves nothing"


def test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks():
    plan = make_plan(2)

    def rows_of(world: int) -> list[list[int]]:
        assigned = [RankAssignment(rank, world, 4) for rank in range(world)]
        steps = [list(islice(plan_steps(lambda _: plan, one, epoch=0, microbatch=0), 5)) for one in assigned]
        return [
            sorted(
                int(row)
                for one in together
                for index, is_filler in one.of_rank()
                if not is_filler
                for row in plan.rows(index)
            )
            for together in zip(*steps, strict=True)
        ]

    steps = list(islice(plan_steps(lambda _: plan, RankAssignment(num_shares=4), epoch=0, microbatch=0), 5))
    assert rows_of(1) == rows_of(2) == rows_of(4) == [sorted(step.rows().tolist()) for step in steps]
    assert all(step.num_samples == len(step.rows()) for step in steps)
    assert rows_of(2)[0] != rows_of(2)[1]


def test_steps_cross_epochs_without_losing_a_sample():
    plans = [make_plan(3, epoch) for epoch in range(3)]
    position = (0, 0)
    seen: dict[int, list[int]] = {}
    steps = plan_steps(lambda epoch: plans[epoch % 3], RankAssignment(), epoch=0, microbatch=0, accumulate=5)
    for step in islice(steps, 40):
        if step.epoch > 1:
            break
        assert (step.epoch, int(step.plan.starts[step.first])) == position
        seen.setdefault(step.epoch, []).extend(step.rows().tolist())
        position = step.position
    assert all(sorted(seen[epoch]) == sorted(plans[epoch].order.tolist()) for epoch in (0, 1))


def test_a_position_inside_a_micro_batch_is_none():
    plan = make_plan(4)
    assert find_microbatch(plan, 0) == 0
    assert find_microbatch(plan, int(plan.starts[3])) == 3
    assert find_microbatch(plan, int(plan.starts[3]) + 1) is None
    assert find_microbatch(plan, plan.num_samples + 1) is None


def test_one_rank_runs_no_filler():
    assert PlannedStep(make_plan(5), 0, 3).of_rank() == [(0, False), (1, False), (2, False)]
