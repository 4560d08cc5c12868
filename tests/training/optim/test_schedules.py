"""Learning-rate schedules; those of published trainers are compared in tests/parity."""

from __future__ import annotations

import math

import pytest

from frameloom.config.schema.optim import ScheduleSection
from frameloom.training.optim.schedules import Schedule, build_schedule
from frameloom.training.train import build_rate


def make(name: str = "constant", num_steps: int = 100, **settings: object) -> Schedule:
    return build_schedule(ScheduleSection.model_validate({"name": name, **settings}), num_steps)


def test_cosine_is_its_formula_with_a_minimum_share():
    schedule = make("cosine", warmup_steps=10, min_share=0.1)
    assert [schedule(step) for step in range(10)] == pytest.approx([(step + 1) / 11 for step in range(10)])
    for step in (10, 11, 55, 99, 100):
        wave = 0.5 * (1 + math.cos(math.pi * (step - 10) / 90))
        assert schedule(step) == pytest.approx(0.1 + 0.9 * wave)
    assert schedule(55) == pytest.approx(0.55)
    assert schedule(100) == schedule(10_000) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_first_step_moves_unless_an_idle_start_is_asked_for(name):
    assert make(name, 10, warmup_steps=4)(0) == pytest.approx(0.2)
    assert make(name, 10, warmup_steps=4, idle_start=True)(0) == 0
    assert make(name, 10)(0) == make(name, 10, idle_start=True)(0) == 1.0


def test_warmup_as_long_as_the_run_never_divides_by_zero():
    schedule = make("cosine", 5, warmup_steps=5)
    assert schedule(4) == pytest.approx(5 / 6)
    assert schedule(5) == 1.0


def test_restarts_begin_at_the_full_rate_again():
    schedule = make("cosine_with_restarts", num_cycles=4)
    assert [schedule(step) for step in (0, 25, 50, 75)] == pytest.approx([1.0] * 4)
    assert schedule(24) < 0.01 and schedule(100) == schedule(500) == 0
    assert make("cosine")(25) != pytest.approx(1.0)


def test_each_fall_has_the_values_of_its_formula() -> None:
    """By hand, for 2 steps of warm-up and 4 of fall to a fifth, at steps 2 to 7."""
    wave = [1.0, 0.8 * (0.5 + math.sqrt(0.125)) + 0.2, 0.6, 0.8 * (0.5 - math.sqrt(0.125)) + 0.2, 0.2, 0.2]
    expected = {
        "linear": [1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
        "cosine": wave,
        "cosine_with_restarts": [1.0, 0.6, 1.0, 0.6, 0.2, 0.2],
        "polynomial": [1.0, 0.8 * 0.5625 + 0.2, 0.8 * 0.25 + 0.2, 0.8 * 0.0625 + 0.2, 0.2, 0.2],
    }
    own = {"cosine_with_restarts": {"num_cycles": 2}, "polynomial": {"power": 2.0}}
    for name, values in expected.items():
        settings = {"warmup_steps": 2, "min_share": 0.2, **own.get(name, {})}
        schedule, longer = make(name, decay_steps=4, **settings), make(name, **settings)
        assert [schedule(step) for step in range(2, 8)] == pytest.approx(values)
        assert [schedule(step) for step in range(2)] == pytest.approx([1 / 3, 2 / 3])
        assert longer(4) > values[2] or name == "cosine_with_restarts"


def test_mindspore_polynomial_is_its_formula() -> None:
    """(lr - end) * (1 - i / M) ** 0.9 + end, with a warm-up that starts at 0."""
    lr, end = 1e-5, 1e-6
    settings = {"warmup_steps": 4, "decay_steps": 10, "min_share": end / lr, "power": 0.9}
    schedule = make("polynomial", 50, idle_start=True, **settings)
    assert [lr * schedule(step) for step in range(4)] == pytest.approx([0, 2.5e-6, 5e-6, 7.5e-6])
    for step in (4, 7, 13, 14, 40):
        share = 1 - min(step - 4, 10) / 10
        assert lr * schedule(step) == pytest.approx((lr - end) * share**0.9 + end)


def test_milestones_multiply_the_rate_and_stop_at_the_minimum() -> None:
    schedule = make("multi_step", milestones=(3, 5, 8), gamma=0.5, min_share=0.2)
    assert [schedule(step) for step in range(10)] == pytest.approx([1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.2, 0.2])
    warm = make("multi_step", warmup_steps=3, milestones=(3,), gamma=0.5)
    assert [warm(step) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 0.5])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"name": "constant", "warmup_steps": 2}, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ({"name": "constant", "warmup_steps": 2, "idle_start": True, "start_share": 0.5}, [0.5, 0.75, 1, 1, 1, 1]),
        ({"name": "linear"}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ({"name": "linear", "decay_steps": 2, "min_share": 0.1}, [1, 0.55, 0.1, 0.1, 0.1, 0.1]),
        ({"name": "polynomial", "power": 2}, [1, 25 / 36, 16 / 36, 9 / 36, 4 / 36, 1 / 36]),
        ({"name": "multi_step", "milestones": [2, 4], "gamma": 0.5}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ({"name": "cosine_with_restarts", "num_cycles": 3}, [1, 0.5, 1, 0.5, 1, 0.5]),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_the_rates_of_a_recipe_are_those_of_its_schedule(world, schedule: dict, expected: list[float]) -> None:
    rate = build_rate(world.recipe(optim={"lr": 2e-3, "schedule": schedule}))
    assert [rate(step) for step in range(1, 7)] == pytest.approx([2e-3 * share for share in expected])
