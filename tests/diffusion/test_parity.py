"""Golden cases of objectives, schedules and masks, and what happens to them when something is changed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frameloom.checkpoint.goldens import read_case, read_table
from frameloom.checkpoint.parity import CaseResult, run_case
from frameloom.core.parity import ParityCase
from frameloom.diffusion import parity

GOLDENS = Path(__file__).parents[1] / "goldens"
# Number of outputs that are compared in each case.
COMPARED = {
    "cogvideox-fun/scheduler": 66,
    "cogvideox-fun/loss": 36,
    "cogvideox-fun/mask_draws": 25,
    "cogvideox-fun/timestep_sampling": 77,
    "open-sora-plan/train_loss_v13": 84,
    "open-sora-v2/time_shift": 9,
    "open-sora-v2/sampling_schedule": 23,
}


def load(name: str, as_name: str | None = None) -> ParityCase:
    path = next(GOLDENS.glob(f"{name}.*"))
    reader = read_table if path.suffix == ".json" else read_case
    return reader(path, name=as_name or name)


def check(case: ParityCase) -> CaseResult:
    return run_case(case, [parity])


@pytest.mark.parametrize("name", COMPARED)
def test_every_output_is_within_tolerance_or_a_listed_deviation(name: str) -> None:
    result = check(load(name))
    assert result.is_good, result
    assert result.num_compared == COMPARED[name]
    assert len(result.outputs) - result.num_compared == (2 if name.endswith("train_loss_v13") else 0)


@pytest.mark.parametrize("name", COMPARED)
def test_a_file_is_known_by_what_it_holds(name: str) -> None:
    """The name of a file says nothing but which deviations are listed for it."""
    kind = name.rpartition("/")[2]
    assert check(load(name, as_name=f"elsewhere/{kind}_other_seed")).is_good


@pytest.mark.parametrize("name", [name for name in COMPARED if not name.endswith(("sampling", "schedule", "draws"))])
def test_disturbed_inputs_are_out_of_tolerance(name: str) -> None:
    case = load(name)
    changed = {key: value + 0.01 if value.is_floating_point() else value for key, value in case.inputs.items()}
    assert not check(dataclasses.replace(case, inputs=changed)).is_good


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cogvideox-fun/scheduler", lambda config: config["configs"]["2b.linspace"].update(beta_end=0.013)),
        ("cogvideox-fun/mask_draws", lambda config: config["draws"][0].update(seed=99)),
        ("cogvideox-fun/timestep_sampling", lambda config: config["distributed_uniform"][1].update(world_size=4)),
        ("open-sora-v2/sampling_schedule", lambda config: config["schedules"][0].update(latent_frames=5)),
    ],
)
def test_another_setting_is_found_out(name: str, change: Callable[[Any], None]) -> None:
    case = load(name)
    config = copy.deepcopy(case.config)
    change(config)
    assert not check(dataclasses.replace(case, config=config)).is_good


def test_other_cases_are_left_to_other_runners() -> None:
    assert not parity.matches(ParityCase("scheduler", {}, {}, {}, {}))
    assert not parity.matches(load("open-sora-v2/packing"))
