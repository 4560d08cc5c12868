"""Guidance against published runs, and that every setting of it matters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.config.schema.sampling import SampleSection
from frameloom.diffusion.guidance import dynamic_scale
from frameloom.diffusion.objectives import DDPMObjective
from frameloom.diffusion.samplers import run_sampler
from frameloom.models.denoisers.cogvideox_fun.weights import read_config
from frameloom.models.registry import get_denoiser
from frameloom.models.text.base import TextStates
from frameloom.sampling.conditions import Prepared
from frameloom.sampling.guidance import GuidedDenoiser
from tests.parity.cases import read_case
from tests.sampling.conftest import Load, make_frames

GOLDENS = Path(__file__).parents[1] / "goldens"


def states(tokens_BKD: Tensor, pooled_BD: Tensor | None = None) -> TextStates:
    mask = torch.ones(tokens_BKD.shape[:2], dtype=torch.bool)
    return TextStates(tokens_BKD, mask, tokens_BKD.new_zeros(len(tokens_BKD), 0) if pooled_BD is None else pooled_BD)


def test_text_guidance_is_that_of_the_original() -> None:
    case = read_case(GOLDENS / "cogvideox-fun" / "pipeline_2b_t2v.safetensors", name="pipeline_2b_t2v")
    family = get_denoiser("cogvideox_fun")
    config = read_config(case.config["transformer"])
    model = family.build(config).eval()
    model.load_state_dict(case.weights)
    schedule = {name: case.config["scheduler"][name] for name in ("beta_schedule", "beta_start", "beta_end")}
    objective = DDPMObjective(spacing="linspace", step_to="even", **schedule)
    found = {}
    for guidance in (6.0, 5.0):
        predict = GuidedDenoiser(
            LoadedDenoiser(family, model, config),
            states(case.inputs["prompt_embeds"]),
            states(case.inputs["negative_prompt_embeds"]),
            Prepared(),
            SampleSection(steps=3, guidance=guidance),
        )
        noise = case.inputs["start_latents"].transpose(1, 2)
        # diffusers' own DDIM is what the original samples with.
        for name in ("default", "ddim"):
            found[guidance, name] = run_sampler(name, objective, predict, noise, num_steps=3, generators=[])
    expected = case.outputs["ddim_origin.latents"].transpose(1, 2)
    torch.testing.assert_close(found[6.0, "default"], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[6.0, "ddim"], expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found[5.0, "default"], expected, atol=1e-2)


def test_dynamic_guidance_grows_to_one_more_than_its_scale() -> None:
    scales = [dynamic_scale(6.0, step, 50) for step in range(50)]
    assert scales == sorted(scales) and scales[0] == pytest.approx(1) and scales[-1] == pytest.approx(7)
    # CogVideoX's formula, which counts noise indices as steps, at the one number of steps where they are the same.
    published = [1 + 6.0 * (1 - np.cos(np.pi * ((1000 - index) / 1000) ** 5)) / 2 for index in (999, 500, 0)]
    assert [dynamic_scale(6.0, step, 1000) for step in (0, 499, 999)] == pytest.approx(published)


def test_every_setting_of_guidance_matters(load: Load) -> None:
    sampler = load("opensora2", steps=12)
    plain = make_frames(sampler)
    for change in (
        {"guidance": 3.0},
        {"negative_prompt": "blurry"},
        {"guidance_law": "oscillating"},
        {"guidance_law": "oscillating_text"},
        {"guidance_law": "dynamic"},
        {"guidance_rescale": 0.7},
    ):
        assert not np.array_equal(plain, make_frames(sampler, **change)), change
