"""Golden cases of optimizers, rates, clipping, averages, batches and whole training and sampling steps."""

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
from frameloom.train import parity, parity_batches, parity_opensora2, parity_sampling

GOLDENS = Path(__file__).parents[1] / "goldens"
RUNNERS = [parity, parity_batches, parity_opensora2, parity_sampling]
# Outputs that are compared in each case, and listed deviations among all its outputs.
COMPARED = {
    "cogvideox-fun/came": (142, 0),
    "cogvideox-fun/grad_clip_rule": (3, 0),
    "open-sora-plan/lr_schedules": (26, 2),
    "open-sora-plan/timesteps_and_collate": (29, 0),
    "open-sora-v2/lr_warmup": (3, 0),
    "open-sora-v2/ema_update": (2, 0),
    "open-sora-v2/flow_train_step": (36, 0),
    "open-sora-v2/flow_conditions": (79, 6),
    "open-sora-v2/cfg_combination": (47, 0),
    "open-sora-v2/sampling_end_to_end": (6, 0),
}


def load(name: str) -> ParityCase:
    path = next(GOLDENS.glob(f"{name}.*"))
    return (read_table if path.suffix == ".json" else read_case)(path, name="some_other_name")


def check(case: ParityCase, name: str) -> CaseResult:
    return run_case(dataclasses.replace(case, name=name), RUNNERS)


@pytest.mark.parametrize("name", COMPARED)
def test_every_output_is_within_tolerance_or_a_listed_deviation(name: str) -> None:
    assert any(runner.matches(load(name)) for runner in RUNNERS)
    result = check(load(name), name)
    assert result.is_good, result
    num_deviations = sum(output.verdict == "deviation" for output in result.outputs)
    assert (result.num_compared, num_deviations) == COMPARED[name]


@pytest.mark.parametrize("name", [name for name in COMPARED if (GOLDENS / f"{name}.safetensors").exists()])
def test_disturbed_inputs_are_out_of_tolerance(name: str) -> None:
    case = load(name)
    changed = {key: value + 0.05 if value.is_floating_point() else value for key, value in case.inputs.items()}
    assert not check(dataclasses.replace(case, inputs=changed), name).is_good


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cogvideox-fun/came", lambda config: config.update(betas=[0.9, 0.99, 0.9999])),
        ("cogvideox-fun/grad_clip_rule", lambda config: config["rows"][0].__setitem__(1, 4)),
        ("open-sora-plan/lr_schedules", lambda config: config["diffusers_get_scheduler"][4].update(lr_warmup_steps=5)),
        ("open-sora-plan/timesteps_and_collate", lambda config: config["collate"][3].update(ae_stride_thw=[4, 16, 16])),
        (
            "open-sora-plan/timesteps_and_collate",
            lambda config: config["explicit_uniform_sampling_v131"][1].update(rank=0),
        ),
        ("open-sora-v2/ema_update", lambda config: config.update(decay=0.9)),
        ("open-sora-v2/cfg_combination", lambda config: config.update(guidance_img=2.0)),
        ("open-sora-v2/sampling_end_to_end", lambda config: config.update(num_steps=11)),
    ],
)
def test_another_setting_is_found_out(name: str, change: Callable[[Any], None]) -> None:
    case = load(name)
    config = copy.deepcopy(case.config)
    change(config)
    result = check(dataclasses.replace(case, config=config), name)
    assert not result.is_good
    assert not result.failed, result.note


def test_sampling_needs_the_autoencoder_beside_it(tmp_path: Path) -> None:
    name = "open-sora-v2/sampling_end_to_end"
    result = check(dataclasses.replace(load(name), path=tmp_path / "sampling.safetensors"), name)
    assert result.failed and "hunyuan_vae.safetensors" in result.note
