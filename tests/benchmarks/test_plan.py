"""The measured claims about plans, at a size that a test can afford."""

from __future__ import annotations

import pytest

from benchmarks.plan import (
    count_tokens,
    make_grid,
    make_mix,
    make_plan,
    measure_balance,
    plan_row_by_row,
)


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("num_rows", [20_000, 200_000])
def test_no_rank_waits_long_on_a_mix_of_sizes_and_lengths(num_rows: int, num_ranks: int) -> None:
    columns, grid = make_mix(num_rows, seed=1), make_grid()
    tokens = count_tokens(grid)
    assert measure_balance(make_plan(columns, grid), tokens, num_ranks).ratio < 1.05
    assert measure_balance(make_plan(columns, grid, cost_group=1), tokens, num_ranks).ratio > 1.1


def test_the_plain_way_fills_the_same_kind_of_batches() -> None:
    pytest.importorskip("pandas")
    columns, grid = make_mix(2000), make_grid()
    batches = plan_row_by_row(columns, grid)
    rows = [row for _, part in batches for row in part]
    assert len(set(rows)) == len(rows)
    assert all(len(part) <= grid.buckets[bucket].batch_size for bucket, part in batches)
    # Its draws are its own, so only the number of rows that find a bucket can be compared.
    assert len(rows) == pytest.approx(make_plan(columns, grid).num_samples, abs=20)
