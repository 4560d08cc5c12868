"""The orders of published trainers beyond their golden cases."""

from __future__ import annotations

import random
from collections import Counter

from frameloom.data.published_orders import GridBatches, RatioBuckets, deal_batches, group_by_shape, unify_batch

SHAPES = ["a"] * 20 + ["b"] * 9 + ["c"] * 3


def order(**changes: object) -> list[int]:
    settings = {"batch_size": 2, "world_size": 2, "pads": random.Random(0), **changes}
    return group_by_shape(SHAPES, **settings)  # type: ignore[arg-type]


def test_batches_hold_one_shape_and_every_row_of_whole_blocks_comes() -> None:
    for rank in deal_batches(order(), batch_size=2, world_size=2):
        assert all(len({SHAPES[row] for row in batch}) == 1 for batch in rank)
    assert set(order(is_grouped=False)) == set(range(len(SHAPES)))


def test_skipped_blocks_are_the_first_ones() -> None:
    assert order(num_skipped=3) == order()[12:]
    assert order(seed=1) != order()


def test_among_equals_the_shape_met_last_stays() -> None:
    assert unify_batch([0, 20], SHAPES, random.Random(0)) == [20, 20]
    assert unify_batch([0, 1, 20], SHAPES, random.Random(0))[:2] == [0, 1]
    assert unify_batch([5, 6], SHAPES, random.Random(0)) == [5, 6]


def test_rows_that_fill_no_group_wait_for_the_next_epoch() -> None:
    walk = RatioBuckets(["x", "x", "x", "y", None], 2)
    first = list(walk.batches(0))
    assert len(first) == 1 and sum(map(len, walk.waiting.values())) == 2
    assert {"x", "y"} == set(walk.waiting)
    assert len(list(walk.batches(1))) == 3


def test_dropped_rests_are_never_seen_and_kept_ones_come_again() -> None:
    buckets, sizes = [0] * 7 + [1] * 3 + [-1], [2, 2]
    dropping = GridBatches(buckets, sizes, 2)
    seen = {row for epoch in range(5) for step in dropping.steps(epoch) for batch in step for row in batch}
    assert seen == set(range(6)) | {7, 8} and dropping.num_batches() == 4
    keeping = GridBatches(buckets, sizes, 2, drop_last=False)
    counts = Counter(row for step in keeping.steps(0) for batch in step for row in batch)
    assert set(counts) == set(range(10)) and counts[0] == counts[7] == 2


def test_a_resumed_epoch_goes_on_where_it_stopped() -> None:
    plan = GridBatches([0] * 12 + [1] * 8, [2, 1], 2)
    assert list(plan.steps(3, start=4)) == list(plan.steps(3))[4:]
    assert list(plan.steps(3)) != list(plan.steps(4))
