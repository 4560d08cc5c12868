"""Curves: smoothing is fair, thinning keeps spikes, names are text, and every value finds its place."""

from __future__ import annotations

import math
import re

import pytest

from frameloom.evaluate.charts import Axis, Line, draw_chart, format_value, smooth, thin, ticks


def test_smoothing_zero_changes_nothing_and_a_constant_stays_itself():
    points = [(1.0, 3.0), (2.0, 5.0), (3.0, 4.0)]
    assert smooth(points, 0) == points
    assert smooth(points, 0.9) != points
    assert [value for _, value in smooth([(float(n), 2.5) for n in range(9)], 0.95)] == pytest.approx([2.5] * 9)


def test_thinning_keeps_the_ends_and_the_spike():
    points = [(float(n), 1000.0 if n == 777 else math.sin(n)) for n in range(5000)]
    kept = thin(points, 100)
    assert len(kept) <= 100 and kept[0] == points[0] and kept[-1] == points[-1]
    assert (777.0, 1000.0) in kept and kept == sorted(kept)
    assert thin(points[:50], 100) == points[:50]


def test_a_chart_has_all_runs_and_no_markup_of_theirs():
    name = "runs/<script>alert(1)</script>${x}"
    chart = draw_chart("Loss", [Line(name, [(1, 2.0), (2, 1.0)], "#111111"), Line("b", [(1, 3.0)], "#222222")])
    assert chart.count("<polyline") == 2 and "#222222" in chart
    assert "<script" not in chart and "${" not in chart and "&lt;script&gt;" in chart
    assert 'data-points="3"' in chart


def test_values_that_cannot_be_drawn_are_left_out():
    chart = draw_chart("Loss", [Line("a", [(1, float("nan")), (2, -1.0), (3, 10.0)], "#111111")], y=Axis(is_log=True))
    assert 'data-points="1"' in chart and "nan" not in chart
    assert "nothing logged yet" in draw_chart("Loss", [Line("a", [(1, float("inf"))], "#111111")])


@pytest.mark.parametrize("values", [(0.0, 0.0), (5.0, 5.0), (-2.0, -2.0), (1e-9, 3e-9), (-4.0, 1e7)])
def test_every_point_lies_inside_the_picture(values):
    chart = draw_chart("x", [Line("a", [(1, values[0]), (9, values[1])], "#111111")])
    for x, y in re.findall(r"([-\d.]+),([-\d.]+)", re.findall(r'polyline points="([^"]+)"', chart)[0]):
        assert 0 <= float(x) <= 560 and 0 <= float(y) <= 270


def test_ticks_are_round_and_inside():
    assert ticks(0.1, 2.07, is_log=False) == [0.5, 1.0, 1.5, 2.0]
    assert ticks(-1, 3, is_log=True)[0] == pytest.approx(0.1) and len(ticks(-1, 3, is_log=True)) <= 7
    assert [format_value(value) for value in (0, 0.0002, 12345.6, 0.13912)] == ["0", "2.00e-4", "12,346", "0.1391"]
