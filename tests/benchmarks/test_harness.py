"""Sides take turns, medians and ratios are those of the rounds, and one failing case costs no other."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from benchmarks.harness import (
    PACKAGES,
    MissingBaseline,
    Row,
    Times,
    compare_numbers,
    compare_rates,
    compare_times,
    load_baseline,
    measure_or_skip,
    take_turns,
)

OURS, OTHER = Times((1.0, 2.0, 4.0), (1.0, 1.0, 1.0)), Times((3.0, 4.0, 4.0), (2.0, 3.0, 4.0))


def test_each_side_goes_first_in_every_other_round_and_warming_up_does_not_count() -> None:
    calls: list[str] = []
    times = take_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, warmup=1)
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert all(len(each.walls) == len(each.cpus) == 3 for each in times.values())


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    row = compare_times("step", "x", OURS, OTHER, against="y", items=2)
    assert (row.ours, row.other, row.ratio) == (1.0, 2.0, 2.0)
    assert (row.ours_cpu_s, row.other_cpu_s, row.repeats) == (0.5, 1.5, 3)
    rate = compare_rates("step", "x", OURS, OTHER, amount=8, unit="clips/s")
    assert (rate.ours, rate.other, rate.ratio, rate.better) == (4.0, 2.0, 2.0, "more")


def test_a_case_that_fails_becomes_a_row_behind_those_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> Iterator[Row]:
        yield compare_numbers("step", "first", 1.0, unit="B")
        raise RuntimeError("no more")

    first, second = measure_or_skip("step", "second", fail)
    assert first.problem == "" and second.problem == "RuntimeError: no more"
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_package_is_named_and_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "no_such_module", "no-such-package")
    (row,) = measure_or_skip("step", "x", lambda: [load_baseline("no_such_module.part")])
    assert row.problem == "" and "no-such-package is not installed; pip install -e '.[bench]'" in row.missing
    with pytest.raises(MissingBaseline):
        load_baseline("no_such_module")
    assert load_baseline("json") is json
