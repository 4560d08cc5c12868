"""Solver steps per second with guidance, tiny models.

For every family the same model of another hand walks in a plain Euler loop; CogVideoX also in diffusers' own pipeline
with its DDIM scheduler, from embeddings to a latent. The other side has a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import Baseline, build_baseline
from benchmarks.harness import (
    BenchSettings,
    IsolatedProcess,
    Row,
    Work,
    compare_rates,
    load_baseline,
    measure_or_skip,
    take_turns,
)
from benchmarks.model import Case, Inputs, build_model, draw_inputs, list_cases
from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.builders.objective import build_objective
from frameloom.config.schema.objective import ObjectiveSection, parse_objective
from frameloom.config.schema.sampling import SampleSection
from frameloom.core.random import stream
from frameloom.diffusion.samplers import run_sampler
from frameloom.models.text.base import TextStates
from frameloom.sampling.conditions import Prepared
from frameloom.sampling.guidance import GuidedDenoiser

_STEPS, _GUIDANCE = 20, 4.0


def measure(bench: BenchSettings) -> Iterator[Row]:
    steps = bench.pick(_STEPS, 2)
    with IsolatedProcess() as isolated:
        for case in list_cases(is_quick=True):
            yield from measure_or_skip("sample", case.family, _measure_family, case, steps, isolated, bench)
        (case,) = [one for one in list_cases(is_quick=True) if one.family == "cogvideox_fun"]
        yield from measure_or_skip("sample", "diffusers' pipeline", _measure_pipeline, case, steps, isolated, bench)


def _measure_family(case: Case, steps: int, isolated: IsolatedProcess, bench: BenchSettings) -> Row:
    family, config, model = build_model(case)
    baseline = build_baseline(case.family, model).name
    settings = SampleSection(steps=steps, guidance=_GUIDANCE)
    denoiser = LoadedDenoiser(family, model.eval(), config)
    ours = _our_walk(denoiser, draw_inputs(case), settings, parse_objective({"kind": "flow"}), "default")
    times = take_turns({"ours": ours, "other": isolated.build(build_plain_walk, case, steps)}, bench.rounds)
    return compare_rates(
        "sample",
        f"{case.family} tiny, {case.batch} clips with guidance",
        times["ours"],
        times["other"],
        amount=steps,
        unit="steps/s",
        against=f"{baseline} in a plain Euler loop",
    )


def _our_walk(
    denoiser: LoadedDenoiser, inputs: Inputs, settings: SampleSection, objective: ObjectiveSection, sampler: str
) -> Work:
    law, negative = build_objective(objective), _empty_text(inputs.text)

    def walk() -> Tensor:
        predict = GuidedDenoiser(denoiser, inputs.text, negative, Prepared(), settings)
        generators = [stream(0, "bench sampler", number) for number in range(len(inputs.noisy_BCFHW))]
        return run_sampler(sampler, law, predict, inputs.noisy_BCFHW, num_steps=settings.steps, generators=generators)

    return walk


def _empty_text(text: TextStates) -> TextStates:
    return TextStates(torch.zeros_like(text.tokens_BKD), text.mask_BK, torch.zeros_like(text.pooled_BD))


def build_plain_walk(case: Case, steps: int) -> Work:
    inputs, baseline = draw_inputs(case), _build_baseline(case)
    both = TextStates.concatenate([_empty_text(inputs.text), inputs.text])

    @torch.no_grad()
    def walk() -> Tensor:
        x = inputs.noisy_BCFHW
        levels = torch.linspace(1, 0, steps + 1)
        for level, following in pairwise(levels):
            time_B = level.expand(2 * len(x))
            without, given = baseline.predict(torch.cat([x, x]), time_B, both).chunk(2)
            x = x + (following - level) * (without + _GUIDANCE * (given - without))
        return x

    return walk


def _measure_pipeline(case: Case, steps: int, isolated: IsolatedProcess, bench: BenchSettings) -> Row:
    family, config, model = build_model(case)
    load_baseline("diffusers")
    settings = SampleSection(steps=steps, guidance=_GUIDANCE)
    denoiser = LoadedDenoiser(family, model.eval(), config)
    ours = _our_walk(denoiser, draw_inputs(case), settings, parse_objective({"kind": "v"}), "ddim")
    times = take_turns({"ours": ours, "other": isolated.build(build_pipeline_walk, case, steps)}, bench.rounds)
    return compare_rates(
        "sample",
        f"{case.family} tiny, DDIM, {case.batch} clips with guidance",
        times["ours"],
        times["other"],
        amount=steps,
        unit="steps/s",
        against="diffusers CogVideoXPipeline",
    )


def _build_baseline(case: Case) -> Baseline:
    baseline = build_baseline(case.family, build_model(case)[2])
    baseline.module.eval()
    return baseline


def build_pipeline_walk(case: Case, steps: int) -> Work:
    diffusers: Any = load_baseline("diffusers")
    inputs = draw_inputs(case)
    # The pipeline asks its autoencoder for nothing but strides here.
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=inputs.noisy_BCFHW.shape[1],
        norm_num_groups=2,
        layers_per_block=1,
    )
    pipeline = diffusers.CogVideoXPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        transformer=_build_baseline(case).module,
        scheduler=diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction"),
    )
    pipeline.set_progress_bar_config(disable=True)
    frames, height, width = case.latent

    def walk() -> Any:
        return pipeline(
            prompt_embeds=inputs.text.tokens_BKD,
            negative_prompt_embeds=torch.zeros_like(inputs.text.tokens_BKD),
            height=height * 8,
            width=width * 8,
            num_frames=4 * (frames - 1) + 1,
            num_inference_steps=steps,
            guidance_scale=_GUIDANCE,
            latents=inputs.noisy_BCFHW.transpose(1, 2),
            output_type="latent",
        )

    return walk
