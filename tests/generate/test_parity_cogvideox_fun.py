"""CogVideoX-Fun's inpaint channels and whole sampling runs, against the original's tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from frameloom.checkpoint.goldens import read_golden
from frameloom.core.errors import CheckpointError
from frameloom.core.parity import ParityCase
from frameloom.generate import parity_cogvideox_fun as parity

GOLDENS = Path(__file__).parents[1] / "goldens" / "cogvideox-fun"
CASES = ["inpaint_channels", *sorted(path.stem for path in GOLDENS.glob("pipeline_*.safetensors"))]


def read_case(name: str) -> ParityCase:
    return read_golden(GOLDENS / f"{name}.safetensors", GOLDENS)


def difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def errors(case: ParityCase) -> dict[str, float]:
    results = {result.name: result for result in parity.run(case)}
    assert results.keys() == case.outputs.keys()
    found = {}
    for name, result in results.items():
        assert result.ours is not None, name
        assert result.ours.shape == result.expected.shape, name
        found[name] = difference(result.ours, result.expected) / result.tolerance
    return found


def test_all_golden_cases_are_found() -> None:
    assert len(CASES) == 5


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_of_a_golden_case_is_reproduced(name: str) -> None:
    case = read_case(name)
    assert parity.matches(case)
    assert max(errors(case).values()) <= 1


@pytest.mark.parametrize(
    ("name", "config", "spared"),
    [
        ("pipeline_2b_inpaint", {"guidance_scale": 5.0}, "first_call.prediction"),
        ("pipeline_5b_inpaint_noise", {"noise_aug_strength": 0.1}, "first_call.hidden_states"),
        ("pipeline_v15_inpaint", {"num_inference_steps": 4}, "first_call.prediction"),
    ],
)
def test_comparison_sees_another_setting(name: str, config: dict[str, float], spared: str) -> None:
    case = read_case(name)
    found = errors(replace(case, config=case.config | config))
    assert found["ddim_origin.latents"] > 100
    assert found[f"ddim_origin.{spared}"] <= 1


def test_the_two_samplers_differ() -> None:
    outputs = read_case("pipeline_2b_inpaint").outputs
    assert difference(outputs["ddim_cog.latents"], outputs["ddim_origin.latents"]) > 1e-2


def test_a_case_without_its_folder_is_refused() -> None:
    with pytest.raises(CheckpointError, match="must be read from a folder"):
        parity.run(replace(read_case("inpaint_channels"), path=None))


def test_cases_of_other_kinds_are_not_matched() -> None:
    assert not parity.matches(ParityCase("other", {"vae_case": "vae"}, {}, {}, {}))
