from __future__ import annotations

import itertools

import numpy as np
import pytest

from frameloom.data.plan import BatchPlan, plan_epoch


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(assignment, batch sizes, costs, alike) with buckets that are empty, tiny, uneven."""
    draw = np.random.default_rng(seed)
    num_buckets = int(draw.integers(1, 9))
    assignment = draw.integers(-1, num_buckets, int(draw.integers(0, 300))).astype(np.int32)
    sizes = draw.integers(1, 9, num_buckets)
    costs = draw.choice([1.0, 2.0, 4.0], num_buckets)
    return assignment, sizes, costs, int(draw.integers(1, 6))


def microbatches(plan: BatchPlan) -> list[tuple[int, tuple[int, ...]]]:
    return [(int(plan.buckets[m]), tuple(plan.rows(m).tolist())) for m in range(plan.num_microbatches)]


@pytest.mark.parametrize("seed", range(50))
def test_every_row_is_used_once_in_its_bucket(seed: int) -> None:
    assignment, sizes, costs, alike = random_case(seed)
    plan = plan_epoch(assignment, sizes, costs, seed=seed, epoch=0, alike=alike)
    assert np.array_equal(np.sort(plan.order), np.flatnonzero(assignment >= 0))
    assert len(plan.starts) == plan.num_microbatches + 1
    for m in range(plan.num_microbatches):
        assert (assignment[plan.rows(m)] == plan.buckets[m]).all()
        assert 1 <= len(plan.rows(m)) <= sizes[plan.buckets[m]]
        assert np.array_equal(plan.order[plan.ordinals(m)], plan.rows(m))


@pytest.mark.parametrize("seed", range(50))
def test_steps_are_homogeneous_or_alike_in_cost(seed: int) -> None:
    assignment, sizes, costs, alike = random_case(seed)
    plan = plan_epoch(assignment, sizes, costs, seed=seed, epoch=0, alike=alike)
    full = plan.num_microbatches // alike * alike
    counts = np.bincount(assignment[assignment >= 0], minlength=len(sizes))
    mixed_costs = []
    num_homogeneous = 0
    for step in range(0, full, alike):
        members = range(step, step + alike)
        whole = all(len(plan.rows(m)) == sizes[plan.buckets[m]] for m in members)
        if whole and len({int(plan.buckets[m]) for m in members}) == 1:
            num_homogeneous += 1
        else:
            mixed_costs.append(sorted(len(plan.rows(m)) * costs[plan.buckets[m]] for m in members))
    assert num_homogeneous >= (counts // (sizes * alike)).sum()
    # Mixed steps cut the sorted costs of the left-overs into runs: their ranges can only touch.
    mixed_costs.sort()
    for lower, upper in itertools.pairwise(mixed_costs):
        assert lower[-1] <= upper[0]


@pytest.mark.parametrize("seed", range(50))
def test_drop_last_gives_only_full_batches_and_full_steps(seed: int) -> None:
    assignment, sizes, costs, alike = random_case(seed)
    plan = plan_epoch(assignment, sizes, costs, seed=seed, epoch=0, alike=alike, drop_last=True)
    assert plan.num_microbatches % alike == 0
    assert np.array_equal(np.diff(plan.starts), sizes[plan.buckets])
    assert len(np.unique(plan.order)) == len(plan.order)
    counts = np.bincount(assignment[assignment >= 0], minlength=len(sizes))
    assert plan.num_microbatches == (counts // sizes).sum() // alike * alike


def test_half_the_batch_with_twice_the_alike_gives_the_same_rows() -> None:
    assignment = np.repeat(np.arange(4, dtype=np.int32), 320)[np.random.default_rng(0).permutation(1280)]
    costs = np.array([1.0, 2.0, 3.0, 4.0])
    wide = plan_epoch(assignment, np.full(4, 32), costs, seed=9, epoch=2, alike=1)
    narrow = plan_epoch(assignment, np.full(4, 16), costs, seed=9, epoch=2, alike=2)
    assert np.array_equal(wide.order, narrow.order)
    assert np.array_equal(np.repeat(wide.buckets, 2), narrow.buckets)
    assert not np.array_equal(wide.order, plan_epoch(assignment, np.full(4, 32), costs, seed=8, epoch=2).order)


def test_order_of_a_bucket_ignores_left_overs_of_others() -> None:
    even = np.zeros(64, dtype=np.int32)
    with_odd = np.concatenate([even, np.ones(7, dtype=np.int32)])
    sizes, costs = np.array([8, 4]), np.array([1.0, 1.0])
    alone = plan_epoch(even, sizes, costs, seed=0, epoch=0, alike=2)
    mixed = plan_epoch(with_odd, sizes, costs, seed=0, epoch=0, alike=2)
    assert mixed.order[mixed.order < 64].tolist() == alone.order.tolist()


def test_plan_changes_with_seed_and_epoch_only() -> None:
    assignment, sizes, costs, alike = random_case(3)
    first = microbatches(plan_epoch(assignment, sizes, costs, seed=1, epoch=0, alike=alike))
    assert first == microbatches(plan_epoch(assignment, sizes, costs, seed=1, epoch=0, alike=alike))
    assert first != microbatches(plan_epoch(assignment, sizes, costs, seed=2, epoch=0, alike=alike))
    assert first != microbatches(plan_epoch(assignment, sizes, costs, seed=1, epoch=1, alike=alike))


def test_order_is_the_same_in_every_version() -> None:
    plan = plan_epoch(
        np.array([0, 1, 0, -1, 1, 0, 0, 1, 0], dtype=np.int32), np.array([2, 2]), np.array([1.0, 3.0]), seed=7, epoch=1
    )
    assert microbatches(plan) == [(0, (0, 8)), (0, (6,)), (1, (7,)), (1, (1, 4)), (0, (5, 2))]


def test_no_rows_give_an_empty_plan() -> None:
    plan = plan_epoch(np.full(5, -1, dtype=np.int32), np.array([2]), np.array([1.0]), seed=0, epoch=0, alike=3)
    assert plan.num_microbatches == 0
    assert plan.starts.tolist() == [0]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="alike"):
        plan_epoch(np.zeros(4, dtype=np.int32), np.array([2]), np.array([1.0]), seed=0, epoch=0, alike=0)
