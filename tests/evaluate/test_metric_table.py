"""Student's t against its tables, the bootstrap against the binomial law, and what an interval promises."""

from __future__ import annotations

import math

import numpy as np
import pytest

from frameloom.core.random import numpy_stream
from frameloom.evaluate.metric_table import bootstrap_mean, summarise, t_quantile


@pytest.mark.parametrize(
    ("share", "freedom", "expected"),
    [
        (0.975, 1, 12.706205),
        (0.975, 2, 4.302653),
        (0.975, 4, 2.776445),
        (0.995, 9, 3.249836),
        (0.975, 29, 2.045230),
        (0.95, 100, 1.660234),
        (0.975, 200, 1.971896),
        (0.975, 201, 1.971837),
        (0.975, 1000, 1.962339),
        (0.975, 10**7, 1.959964),
    ],
)
def test_quantiles_are_those_of_the_tables(share: float, freedom: int, expected: float) -> None:
    assert t_quantile(share, freedom) == pytest.approx(expected, abs=2e-6)


def test_an_interval_by_hand() -> None:
    # 1, 2, 3: mean 2, deviation 1, reach 4.302653 / sqrt(3).
    found = summarise([1.0, 2.0, 3.0])
    assert (found.count, found.mean, found.std, found.smallest, found.largest) == (3, 2.0, 1.0, 1.0, 3.0)
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
    assert found.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-5)
    wider = summarise([1.0, 2.0, 3.0], confidence=0.99)
    assert wider.low < found.low  # type: ignore[operator]


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    draws = numpy_stream(0, "test intervals").normal(5.0, 2.0, (4000, 5))
    found = [summarise(row.tolist(), confidence=0.9) for row in draws]
    share = np.mean([one.low < 5.0 < one.high for one in found])  # type: ignore[operator]
    assert share == pytest.approx(0.9, abs=0.02)


def test_one_number_and_infinite_ones_have_no_interval() -> None:
    alone = summarise([7.0])
    assert (alone.mean, alone.low, alone.std) == (7.0, None, None)
    equal = summarise([30.0, math.inf])
    assert equal.mean == math.inf and equal.low is None and equal.smallest == 30.0
    with pytest.raises(ValueError, match="at least one"):
        summarise([])


def test_the_bootstrap_of_shares_follows_the_binomial_law() -> None:
    # Quantiles 2.5% and 97.5% of Binomial(16, 1/2) are 4 and 12; with two numbers the mean is 0, 1/2, 1/2 or 1.
    assert bootstrap_mean([0.0] * 8 + [1.0] * 8) == (0.25, 0.75)
    assert bootstrap_mean([0.0] * 8 + [1.0] * 8, confidence=0.999) != (0.25, 0.75)
    assert bootstrap_mean([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap_mean([0.0, 1.0], confidence=0.4) == (0.5, 0.5)
    assert bootstrap_mean([3.0] * 5) == (3.0, 3.0)


def test_the_bootstrap_agrees_with_student_on_many_normal_numbers() -> None:
    values = numpy_stream(0, "test bootstrap").normal(5, 2, 400).tolist()
    student, bootstrap = summarise(values), summarise(values, intervals="bootstrap")
    assert bootstrap.mean == student.mean and (bootstrap.low, bootstrap.high) != (student.low, student.high)
    assert bootstrap.low == pytest.approx(student.low, abs=0.02)
    assert bootstrap.high == pytest.approx(student.high, abs=0.02)
    assert summarise(values, intervals="bootstrap") == bootstrap


def test_the_bootstrap_refuses_what_has_no_mean() -> None:
    for values in ([], [math.inf, 1.0]):
        with pytest.raises(ValueError, match="bootstrap"):
            bootstrap_mean(values)
