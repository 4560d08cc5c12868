from __future__ import annotations

import itertools
import pickle
import time

import numpy as np
import pytest

from frameloom.data.order.plan import COST_GROUP, TOLERANCE, BatchPlan, plan_epoch
from tests.data.loading.plan_requests import make_requests


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(assignment, batch sizes, costs, accumulate) with buckets that are empty, tiny, uneven."""
    draw = np.random.default_rng(seed)
    num_buckets = int(draw.integers(1, 9))
    assignment = draw.integers(-1, num_buckets, int(draw.integers(0, 300))).astype(np.int32)
    sizes = draw.integers(1, 9, num_buckets)
    costs = draw.choice([1.0, 2.0, 4.0], num_buckets)
    return assignment, sizes, costs, int(draw.integers(1, 6))


def microbatches(plan: BatchPlan) -> list[tuple[int, tuple[int, ...]]]:
    return [(int(plan.buckets[m]), tuple(plan.rows(m).tolist())) for m in range(plan.num_microbatches)]


@pytest.mark.parametrize("seed", range(50))
def test_steps_of_one_rank_have_one_shape_or_are_alike_in_cost(seed: int) -> None:
    assignment, sizes, costs, accumulate = random_case(seed)
    plan = plan_epoch(assignment, sizes, costs, seed=seed, epoch=0, accumulate=accumulate)
    mixed_costs = []
    num_of_one_shape = 0
    for step in range(0, plan.num_microbatches // accumulate * accumulate, accumulate):
        members = range(step, step + accumulate)
        whole = all(len(plan.rows(m)) == sizes[plan.buckets[m]] for m in members)
        if whole and len({int(plan.buckets[m]) for m in members}) == 1:
            num_of_one_shape += 1
        else:
            mixed_costs.append(sorted(len(plan.rows(m)) * costs[plan.buckets[m]] for m in members))
    counts = np.bincount(assignment[assignment >= 0], minlength=len(sizes))
    assert num_of_one_shape >= (counts // (sizes * accumulate)).sum()
    # Mixed units cut the sorted costs of the left-overs: their ranges can only touch.
    mixed_costs.sort()
    for lower, upper in itertools.pairwise(mixed_costs):
        assert lower[-1] <= upper[0]


def step_costs(plan: BatchPlan, costs: np.ndarray, num_ranks: int) -> np.ndarray:
    """[step, rank] costs of the whole steps of an epoch."""
    each = np.diff(plan.starts) * costs[plan.buckets]
    return each[: len(each) // num_ranks * num_ranks].reshape(-1, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 8, 32, 64])
def test_a_step_is_even_unless_it_holds_the_border_of_two_cost_classes(num_ranks: int) -> None:
    draw = np.random.default_rng(0)
    costs = np.geomspace(1, 40, 12)
    assignment = draw.choice(12, 60_000, p=np.geomspace(1, 0.02, 12) / np.geomspace(1, 0.02, 12).sum()).astype(np.int32)
    plan = plan_epoch(assignment, np.full(12, 4), costs, seed=0, epoch=0)
    steps = step_costs(plan, costs, num_ranks)
    uneven = steps.max(axis=1) > TOLERANCE * steps.min(axis=1)
    # One border after each class; a partial micro-batch of each bucket is a class of its own at worst.
    assert uneven.sum() <= 2 * 12
    random_order = plan_epoch(assignment, np.full(12, 4), costs, seed=0, epoch=0, cost_group=1)
    shuffled = step_costs(random_order, costs, num_ranks)
    assert (shuffled.max(axis=1) > TOLERANCE * shuffled.min(axis=1)).mean() > 0.5


def test_runs_of_a_cost_class_mix_its_buckets_and_are_spread_over_the_epoch() -> None:
    assignment = np.repeat(np.arange(4, dtype=np.int32), [40_000, 40_000, 4_000, 4_000])
    costs = np.array([1.0, 1.01, 8.0, 8.1])
    plan = plan_epoch(assignment, np.full(4, 1), costs, seed=3, epoch=0)
    runs = plan.buckets[: plan.num_microbatches // COST_GROUP * COST_GROUP].reshape(-1, COST_GROUP)
    # Both buckets of a class are in nearly every run of it.
    assert (np.array([len(set(run)) for run in runs.tolist()]) > 1).mean() > 0.99
    dear = np.flatnonzero(runs.min(axis=1) >= 2)
    quarters = np.bincount(4 * dear // len(runs), minlength=4)
    assert quarters.min() > 0.8 * quarters.mean()


def test_a_small_set_gets_short_runs_so_that_it_stays_mixed() -> None:
    assignment = np.repeat(np.arange(2, dtype=np.int32), 40)
    plan = plan_epoch(assignment, np.ones(2, dtype=np.int64), np.array([1.0, 9.0]), seed=0, epoch=0, cost_group=64)
    changes = np.count_nonzero(np.diff(plan.buckets))
    assert changes > 8


def test_half_the_batch_with_twice_the_accumulation_gives_the_same_rows() -> None:
    assignment = np.repeat(np.arange(4, dtype=np.int32), 3200)[np.random.default_rng(0).permutation(12800)]
    costs = np.array([1.0, 2.0, 3.0, 4.0])
    wide = plan_epoch(assignment, np.full(4, 32), costs, seed=9, epoch=2, cost_group=8)
    narrow = plan_epoch(assignment, np.full(4, 16), costs, seed=9, epoch=2, accumulate=2, cost_group=8)
    assert np.array_equal(wide.order, narrow.order)
    assert np.array_equal(np.repeat(wide.buckets, 2), narrow.buckets)
    other = plan_epoch(assignment, np.full(4, 32), costs, seed=8, epoch=2, cost_group=8)
    assert not np.array_equal(wide.order, other.order)


def test_where_all_costs_are_alike_runs_change_nothing() -> None:
    assignment = np.random.default_rng(1).integers(0, 3, 5000).astype(np.int32)
    sizes, costs = np.ones(3, dtype=np.int64), np.array([1.0, 1.01, 1.02])
    with_runs = plan_epoch(assignment, sizes, costs, seed=0, epoch=0, cost_group=64)
    without = plan_epoch(assignment, sizes, costs, seed=0, epoch=0, cost_group=1)
    assert np.array_equal(with_runs.order, without.order)
    uneven = plan_epoch(assignment, sizes, costs**20, seed=0, epoch=0, cost_group=64)
    assert not np.array_equal(uneven.order, without.order)


def test_rows_come_as_often_as_they_are_shown_and_not_side_by_side() -> None:
    shown = np.sort(np.concatenate([np.arange(1000), np.arange(500), np.arange(500)]))
    assignment = (np.arange(1200) % 3 - 1).astype(np.int32)
    plan = plan_epoch(assignment, np.array([4, 4]), np.ones(2), seed=0, epoch=0, shown=shown)
    assert np.array_equal(np.sort(plan.order), shown[assignment[shown] >= 0])
    assert all((assignment[plan.rows(m)] == plan.buckets[m]).all() for m in range(plan.num_microbatches))
    assert np.count_nonzero(np.diff(plan.order) == 0) < 20
    once = plan_epoch(assignment, np.array([4, 4]), np.ones(2), seed=0, epoch=0)
    assert np.array_equal(np.sort(once.order), np.flatnonzero(assignment >= 0))
    all_rows = plan_epoch(assignment, np.array([4, 4]), np.ones(2), seed=0, epoch=0, shown=np.arange(1200))
    assert np.array_equal(all_rows.order, once.order)


def test_order_is_the_same_in_every_version() -> None:
    plan = plan_epoch(
        np.array([0, 1, 0, -1, 1, 0, 0, 1, 0], dtype=np.int32), np.array([2, 2]), np.array([1.0, 3.0]), seed=7, epoch=1
    )
    assert microbatches(plan) == [(0, (0, 8)), (0, (6,)), (1, (7,)), (1, (1, 4)), (0, (5, 2))]


def test_a_request_carries_its_rows_and_not_the_plan() -> None:
    """Workers get requests: their memory does not grow with the number of rows."""
    plan = plan_epoch(np.zeros(1_000_000, dtype=np.int32), np.array([4]), np.array([1.0]), seed=0, epoch=0)
    assert len(pickle.dumps(next(make_requests(plan, position=1000)))) < 2000
    assert len(pickle.dumps(plan)) > 1_000_000


def test_a_lookup_is_far_below_a_millisecond() -> None:
    plan = plan_epoch(np.zeros(1_000_000, dtype=np.int32), np.array([4]), np.array([1.0]), seed=0, epoch=0)
    start_s = time.process_time()
    for microbatch in range(0, plan.num_microbatches, 250):
        plan.rows(microbatch)
    assert (time.process_time() - start_s) / 1000 < 1e-3


def test_no_rows_give_an_empty_plan() -> None:
    plan = plan_epoch(np.full(5, -1, dtype=np.int32), np.array([2]), np.array([1.0]), seed=0, epoch=0, accumulate=3)
    assert plan.num_microbatches == 0
    assert plan.starts.tolist() == [0]
    assert plan.order.tolist() == []


def test_many_buckets_are_counted_beyond_16_bits() -> None:
    num_buckets = 40_000
    assignment = np.array([39_999, 5, 39_999, 35_000], dtype=np.int32)
    plan = plan_epoch(assignment, np.full(num_buckets, 2), np.ones(num_buckets), seed=0, epoch=0)
    assert sorted(microbatches(plan)) in (
        [(5, (1,)), (35_000, (3,)), (39_999, (0, 2))],
        [(5, (1,)), (35_000, (3,)), (39_999, (2, 0))],
    )


@pytest.mark.parametrize("wrong", [{"cost_group": 0}, {"accumulate": 0}])
def test_wrong_arguments_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="accumulate and cost_group"):
        plan_epoch(np.zeros(4, dtype=np.int32), np.array([2]), np.array([1.0]), seed=0, epoch=0, **wrong)
