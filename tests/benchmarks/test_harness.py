"""Sides take turns, medians and ratios are those of the rounds, and one failing case costs no other."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from benchmarks.harness import (
    PACKAGES,
    Contender,
    MissingBaseline,
    Row,
    Times,
    compare_numbers,
    compare_rates,
    compare_times,
    load_baseline,
    measure_or_skip,
    processor_seconds,
    take_turns,
)

OURS, OTHER = Times((1.0, 2.0, 4.0), (1.0, 1.0, 1.0)), Times((3.0, 4.0, 4.0), (2.0, 3.0, 4.0))


def test_each_side_goes_first_in_every_other_round_and_warming_up_does_not_count() -> None:
    calls: list[str] = []
    times = take_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, warmup=1)
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert all(len(each.walls) == len(each.cpus) == 3 for each in times.values())


def test_what_comes_before_and_after_is_not_timed() -> None:
    spent: list[float] = []

    def burn() -> None:
        start = processor_seconds()
        sum(number * number for number in range(300_000))
        spent.append(processor_seconds() - start)

    times = take_turns({"idle": Contender(lambda: None, prepare=burn, finish=burn), "busy": burn}, 1, warmup=0)
    assert times["idle"].cpu_s < min(spent) <= times["busy"].cpu_s


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    row = compare_times("step", "x", OURS, OTHER, against="y", items=2)
    assert (row.ours, row.other, row.ratio) == (1.0, 2.0, 2.0)
    assert (row.ours_cpu_s, row.other_cpu_s, row.repeats) == (0.5, 1.5, 3)
    rate = compare_rates("step", "x", OURS, OTHER, amount=8, unit="clips/s")
    assert (rate.ours, rate.other, rate.ratio, rate.better) == (4.0, 2.0, 2.0, "more")


@pytest.mark.parametrize(("better", "ratio"), [("less", 2.0), ("more", 0.5)])
def test_more_than_one_is_always_better(better: str, ratio: float) -> None:
    assert compare_numbers("step", "x", 2.0, 4.0, unit="B", better=better).ratio == ratio  # type: ignore[arg-type]
    assert compare_numbers("step", "x", 2.0, unit="B").ratio is None


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


def test_a_row_survives_being_written_and_read() -> None:
    row = compare_times("step", "x", OURS, OTHER, against="y", at=("tokens", 1024.0))
    assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row
    assert Row.from_json(Row("step", "z").to_json()) != row
