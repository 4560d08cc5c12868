"""Limits of the gradient norm."""

from __future__ import annotations

import pytest

from frameloom.core.errors import ConfigError
from frameloom.train.clipping import FadingLimit


def test_the_limit_narrows_to_its_end_and_stays() -> None:
    rule = FadingLimit(0.05)
    assert [rule.at(step) for step in (0, 500, 1000, 9999)] == pytest.approx([0.25, 0.15, 0.05, 0.05])
    assert FadingLimit(0.05, num_steps=0).at(0) == 0.05


def test_spikes_are_cut_harder_once_the_limit_is_narrow() -> None:
    rule = FadingLimit(0.05)
    assert rule.for_norm(1000, 10.0) == 0.05
    assert rule.for_norm(1001, 0.2) == 0.05
    assert rule.for_norm(1001, 0.4) == pytest.approx(0.05 / 8)
    assert rule.for_norm(1001, 100.0) == pytest.approx(0.005)
    assert rule.for_norm(500, 100.0) == pytest.approx(0.15)


@pytest.mark.parametrize("settings", [{"max_norm": 0.0}, {"max_norm": 1.0, "first_ratio": 0.0}])
def test_limits_that_stop_training_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        FadingLimit(**settings)
