from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from frameloom.core.errors import ConfigError
from frameloom.training.optim.schedules import build_schedule
from frameloom.training.train import build_rate

GOLDENS = Path(__file__).parents[2] / "goldens"


def golden_schedules() -> list[dict]:
    return json.loads((GOLDENS / "open-sora-plan" / "lr_schedules.json").read_text())["diffusers_get_scheduler"]


@pytest.mark.parametrize("row", golden_schedules(), ids=lambda row: f"{row['name']}-{row['base_lr']}")
def test_schedules_match_diffusers_until_the_end(row):
    accumulation = row["gradient_accumulation_steps"]
    num_steps = row["max_train_steps"] * accumulation
    schedule = build_schedule(
        row["name"],
        num_steps=num_steps,
        num_warmup_steps=row["lr_warmup_steps"] * accumulation,
        # The published "polynomial" ends at 1e-7.
        min_share=1e-7 / row["base_lr"] if row["name"] == "polynomial" else 0.0,
        idle_start=True,
    )
    expected = row["lr_after_k_scheduler_steps"]
    # Past the end the plain cosine of diffusers rises again; ours stays down.
    count = num_steps + 1 if row["name"] == "cosine" else len(expected)
    found = [row["base_lr"] * schedule(step) for step in range(count)]
    assert found == pytest.approx(expected[:count], rel=1e-12, abs=1e-20)
    if row["name"] != "constant":
        eager = build_schedule(row["name"], num_steps=num_steps, num_warmup_steps=row["lr_warmup_steps"])
        assert [row["base_lr"] * eager(step) for step in range(count)] != pytest.approx(expected[:count], rel=1e-3)


def test_warmup_matches_open_sora2():
    golden = json.loads((GOLDENS / "open-sora-v2" / "lr_warmup.json").read_text())["lr_used_at_step_0_to_14"]
    assert len(golden) == 3
    for label, expected in golden.items():
        words = label.split()
        base, initial, num_warmup_steps = float(words[1]), float(words[3]), int(words[5])
        schedule = build_schedule(
            "constant_with_warmup", num_steps=15, num_warmup_steps=num_warmup_steps, first_share=initial / base
        )
        assert [base * schedule(step) for step in range(15)] == pytest.approx(expected, rel=1e-12)


def test_cosine_is_its_formula_with_a_minimum_share():
    schedule = build_schedule("cosine", num_steps=100, num_warmup_steps=10, min_share=0.1)
    assert [schedule(step) for step in range(10)] == pytest.approx([(step + 1) / 11 for step in range(10)])
    for step in (10, 11, 55, 99, 100):
        wave = 0.5 * (1 + math.cos(math.pi * (step - 10) / 90))
        assert schedule(step) == pytest.approx(0.1 + 0.9 * wave)
    assert schedule(55) == pytest.approx(0.55)
    assert schedule(100) == schedule(10_000) == pytest.approx(0.1)


def test_linear_is_its_formula_with_a_minimum_share():
    schedule = build_schedule("linear", num_steps=60, num_warmup_steps=20, min_share=0.5)
    assert [schedule(step) for step in (20, 30, 40, 60, 99)] == pytest.approx([1.0, 0.875, 0.75, 0.5, 0.5])


@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine"])
def test_first_step_moves_unless_an_idle_start_is_asked_for(name):
    assert build_schedule(name, num_steps=10, num_warmup_steps=4)(0) == pytest.approx(0.2)
    assert build_schedule(name, num_steps=10, num_warmup_steps=4, idle_start=True)(0) == 0


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_no_warmup_begins_at_the_full_rate(name):
    assert build_schedule(name, num_steps=10)(0) == 1.0
    assert build_schedule(name, num_steps=10, idle_start=True)(0) == 1.0


def test_warmup_as_long_as_the_run_never_divides_by_zero():
    schedule = build_schedule("cosine", num_steps=5, num_warmup_steps=5)
    assert schedule(4) == pytest.approx(5 / 6)
    assert schedule(5) == 1.0


def test_unknown_schedule_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        build_schedule("cosin", num_steps=10)  # type: ignore[arg-type]


def test_restarts_begin_at_the_full_rate_again():
    schedule = build_schedule("cosine_with_restarts", num_steps=100, num_cycles=4)
    assert [schedule(step) for step in (0, 25, 50, 75)] == pytest.approx([1.0] * 4)
    assert schedule(24) < 0.01 and schedule(100) == schedule(500) == 0
    assert build_schedule("cosine", num_steps=100)(25) != pytest.approx(1.0)


def test_a_higher_power_falls_faster():
    plain, square = (build_schedule("polynomial", num_steps=100, power=power) for power in (1.0, 2.0))
    assert plain(50) == pytest.approx(0.5) and square(50) == pytest.approx(0.25)
    assert plain(0) == square(0) == 1


def test_each_fall_has_the_values_of_its_formula() -> None:
    """By hand, for 2 steps of warm-up and 4 of fall to a fifth, at steps 2 to 7."""
    wave = [1.0, 0.8 * (0.5 + math.sqrt(0.125)) + 0.2, 0.6, 0.8 * (0.5 - math.sqrt(0.125)) + 0.2, 0.2, 0.2]
    expected = {
        "linear": [1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
        "cosine": wave,
        "cosine_with_restarts": [1.0, 0.6, 1.0, 0.6, 0.2, 0.2],
        "polynomial": [1.0, 0.8 * 0.5625 + 0.2, 0.8 * 0.25 + 0.2, 0.8 * 0.0625 + 0.2, 0.2, 0.2],
    }
    for name, values in expected.items():
        schedule = build_schedule(
            name, num_steps=100, num_warmup_steps=2, num_decay_steps=4, min_share=0.2, num_cycles=2, power=2.0
        )
        assert [schedule(step) for step in range(2, 8)] == pytest.approx(values)
        assert [schedule(step) for step in range(2)] == pytest.approx([1 / 3, 2 / 3])
        longer = build_schedule(name, num_steps=100, num_warmup_steps=2, min_share=0.2, num_cycles=2, power=2.0)
        assert longer(4) > expected[name][2] or name == "cosine_with_restarts"


def test_mindspore_polynomial_is_its_formula() -> None:
    """(lr - end) * (1 - i / M) ** 0.9 + end, with a warm-up that starts at 0."""
    lr, end = 1e-5, 1e-6
    settings = {"num_warmup_steps": 4, "num_decay_steps": 10, "min_share": end / lr, "power": 0.9}
    schedule = build_schedule("polynomial", num_steps=50, idle_start=True, **settings)
    assert [lr * schedule(step) for step in range(4)] == pytest.approx([0, 2.5e-6, 5e-6, 7.5e-6])
    for step in (4, 7, 13, 14, 40):
        share = 1 - min(step - 4, 10) / 10
        assert lr * schedule(step) == pytest.approx((lr - end) * share**0.9 + end)


def test_milestones_multiply_the_rate_and_stop_at_the_minimum() -> None:
    schedule = build_schedule("multi_step", num_steps=100, milestones=(3, 5, 8), gamma=0.5, min_share=0.2)
    assert [schedule(step) for step in range(10)] == pytest.approx([1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.2, 0.2])
    warm = build_schedule("multi_step", num_steps=100, num_warmup_steps=3, milestones=(3,), gamma=0.5)
    assert [warm(step) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 0.5])


def test_a_warmup_may_start_above_zero() -> None:
    schedule = build_schedule("constant_with_warmup", num_steps=9, num_warmup_steps=4, first_share=0.2, idle_start=True)
    assert [schedule(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


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
