"""Who takes which micro-batch: every one once, equally many rounds for all, the same samples for any number."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from frameloom.core.random import numpy_stream
from frameloom.data.order.plan import BatchPlan, plan_epoch
from frameloom.data.order.rank_assignment import Pick, Shares, Span, find_microbatch, iterate_spans

SIZES, COSTS = np.array([4, 2, 3]), np.array([1.0, 2.0, 5.0])


def make_plan(seed: int, epoch: int = 0, num_rows: int = 100) -> BatchPlan:
    assignment = numpy_stream(seed, "rows").integers(-1, 3, num_rows).astype(np.int32)
    return plan_epoch(assignment, SIZES, COSTS, seed=seed, epoch=epoch)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("kinds", [None, [0, 1, 1]])
def test_each_micro_batch_is_run_once_and_all_take_as_many_rounds(world, kinds):
    for seed in range(10):
        plan = make_plan(seed)
        for first in range(0, plan.num_microbatches, world):
            span = Span(plan, first, min(first + world, plan.num_microbatches))
            everyone = [Shares(rank, world, world) for rank in range(world)]
            if kinds is not None:
                everyone = [one.by_kind(kinds) for one in everyone]
            picks = [one.pick(span) for one in everyone]
            assert len({len(own) for own in picks}) == 1
            run = sorted(pick.index for own in picks for pick in own if not pick.is_filler)
            assert run == list(range(span.first, span.end))
            # Nobody is given its own micro-batch again as a filler.
            assert all(len({pick.index for pick in own}) == len(own) for own in picks if world > 1)


def test_a_round_holds_one_kind_and_the_lowest_comes_first():
    plan = make_plan(1)
    kinds = np.array([0, 1, 1])
    mixed = 0
    for first in range(0, plan.num_microbatches - 8, 8):
        span = Span(plan, first, first + 8)
        indices, _ = Shares(0, 4, 8).by_kind(kinds).deal(span)
        found = kinds[plan.buckets[indices]]
        assert (found == found[:, :1]).all() and (np.diff(found[:, 0]) >= 0).all()
        plain = kinds[plan.buckets[Shares(0, 4, 8).deal(span)[0]]]
        mixed += int((plain != plain[:, :1]).any())
    assert mixed, "without kinds no round was mixed: the test proves nothing"


def test_the_samples_of_a_step_do_not_depend_on_the_number_of_processes():
    plan = make_plan(2)
    spans = list(islice(iterate_spans(lambda epoch: plan, epoch=0, microbatch=0, per_step=4), 5))

    def rows_of(span: Span, world: int) -> list[int]:
        picks = [pick for rank in range(world) for pick in Shares(rank, world, 4).pick(span) if not pick.is_filler]
        return sorted(int(row) for pick in picks for row in plan.rows(pick.index))

    for span in spans:
        assert rows_of(span, 1) == rows_of(span, 2) == rows_of(span, 4) == sorted(span.rows().tolist())
        assert span.num_samples == len(span.rows())
    assert rows_of(spans[0], 2) != rows_of(spans[1], 2)


def test_spans_cross_epochs_without_losing_a_sample():
    plans = [make_plan(3, epoch) for epoch in range(3)]
    position = (0, 0)
    seen: dict[int, list[int]] = {}
    for span in islice(iterate_spans(lambda epoch: plans[epoch % 3], epoch=0, microbatch=0, per_step=5), 40):
        if span.epoch > 1:
            break
        assert (span.epoch, int(span.plan.starts[span.first])) == position
        seen.setdefault(span.epoch, []).extend(span.rows().tolist())
        position = span.after
    assert all(sorted(seen[epoch]) == sorted(plans[epoch].order.tolist()) for epoch in (0, 1))


def test_a_position_inside_a_micro_batch_is_none():
    plan = make_plan(4)
    assert find_microbatch(plan, 0) == 0
    assert find_microbatch(plan, int(plan.starts[3])) == 3
    assert find_microbatch(plan, int(plan.starts[3]) + 1) is None
    assert find_microbatch(plan, plan.num_samples + 1) is None


def test_one_process_runs_no_filler():
    span = Span(make_plan(5), 0, 3)
    assert Shares().pick(span) == [Pick(0), Pick(1), Pick(2)]
