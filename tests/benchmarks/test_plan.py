"""The measured claims about plans, at a size that a test can afford."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.plan import (
    count_tokens,
    make_grid,
    make_mix,
    make_plan,
    measure_balance,
    measure_cost,
    plan_row_by_row,
)


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("num_rows", [20_000, 200_000])
def test_no_rank_waits_long_on_a_mix_of_sizes_and_lengths(num_rows: int, num_ranks: int) -> None:
    columns, grid = make_mix(num_rows, seed=1), make_grid()
    tokens = count_tokens(grid)
    assert measure_balance(make_plan(columns, grid), tokens, num_ranks).ratio < 1.05
    assert measure_balance(make_plan(columns, grid, alike=1), tokens, num_ranks).ratio > 1.1


def test_the_mix_has_a_long_tail_and_many_buckets() -> None:
    columns, grid = make_mix(20_000), make_grid()
    plan = make_plan(columns, grid)
    counts = np.bincount(plan.buckets, minlength=len(grid.buckets))
    assert np.count_nonzero(counts) > 200
    assert counts.max() > 20 * np.median(counts[counts > 0])
    assert np.array_equal(columns.frames, make_mix(20_000).frames)
    assert not np.array_equal(columns.frames, make_mix(20_000, seed=1).frames)


def test_the_plain_way_fills_the_same_kind_of_batches() -> None:
    pytest.importorskip("pandas")
    columns, grid = make_mix(2000), make_grid()
    batches = plan_row_by_row(columns, grid)
    rows = [row for _, part in batches for row in part]
    assert len(set(rows)) == len(rows)
    assert all(len(part) <= grid.buckets[bucket].batch_size for bucket, part in batches)
    # Its draws are its own, so only the number of rows that find a bucket can be compared.
    assert len(rows) == pytest.approx(make_plan(columns, grid).num_samples, abs=20)


def test_costs_are_those_of_the_rows_asked_for() -> None:
    found = measure_cost(20_000)
    assert (
        found.num_rows == 20_000 and found.num_microbatches == make_plan(make_mix(20_000), make_grid()).num_microbatches
    )
    assert found.peak_bytes >= found.before_bytes > 0 and found.cpu_s > 0
