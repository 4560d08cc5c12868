"""What the objective's features cost beside a bare loop: noise, target, weight, masks and the loss, without the model.

Each row is the work of one feature on the same latents: drawing, mixing, the loss and its gradient back to the
prediction. It is told in processor time, which a busy machine disturbs least, and as a share of a bare training step
(forward, backward and AdamW of the demo's denoiser). All of them take turns within one run, and medians are compared; a
whole step with everything on is set against a bare one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import BenchSettings, Row, Work, compare_numbers, compare_times, take_turns
from benchmarks.step import open_trainer, plain_step, prepare_demo
from frameloom.builders.objective import build_objective
from frameloom.config.schema.objective import ObjectiveSection, parse_objective
from frameloom.core.random import stream
from frameloom.data.loading.batch import Batch
from frameloom.diffusion.conditioning import MaskRandom, draw_end_mask, draw_frame_mask, draw_region_mask
from frameloom.diffusion.objectives import add_noise, weighted_error_B
from frameloom.diffusion.tables import END_SHARES
from frameloom.training.loop import Trainer
from frameloom.training.tasks.denoiser import DenoiserTask
from frameloom.training.tasks.noising import apply_noise_options, draw_levels, draw_normal

EVERYTHING: dict[str, Any] = {
    "kind": "v",
    "min_snr_gamma": 5.0,
    "noise_offset": 0.05,
    "input_perturbation": 0.1,
    "stratified_levels": 8,
    "bias": {"strategy": "later", "multiplier": 2.0},
    "motion_share": 0.25,
}
EVERYTHING_NAME = "v, all of these"
FEATURES: dict[str, dict[str, Any]] = {
    "flow, uniform levels": {"distribution": "uniform"},
    "flow, logit-normal levels": {},
    "flow, levels by mode, sd3 shift, cosmap": {"distribution": "mode", "shift": "sd3", "weighting": "cosmap"},
    "epsilon": {"kind": "epsilon"},
    "v": {"kind": "v"},
    "v, min-SNR weights": {"kind": "v", "min_snr_gamma": 5.0},
    "v, biased levels": {"kind": "v", "bias": {"strategy": "later", "multiplier": 2.0}},
    "v, levels in 8 strata": {"kind": "v", "stratified_levels": 8},
    "v, noise offset": {"kind": "v", "noise_offset": 0.05},
    "v, input perturbation": {"kind": "v", "input_perturbation": 0.1},
    "v, motion loss": {"kind": "v", "motion_share": 0.25},
    "edm": {"kind": "edm"},
    EVERYTHING_NAME: EVERYTHING,
}


def measure(bench: BenchSettings) -> Iterator[Row]:
    """A step with everything on against a bare one; asked for by name, every feature beside a bare step."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        recipe = prepare_demo(Path(folder), steps=8 + bench.rounds, num_clips=bench.pick(40, 12))
        works = _list_works(open_trainer(recipe, Path(folder), stack))
        if not bench.is_alone:
            works = {name: works[name] for name in ("bare step", "full step", EVERYTHING_NAME)}
        times = take_turns(works, bench.rounds, warmup=bench.pick(3, 0))
    bare, full = times.pop("bare step"), times.pop("full step")
    yield compare_times("objective", "a step with everything on", full, bare, against="a bare step")
    for name, own in times.items():
        # Its own processor time as a share of a bare step's, which a busy machine disturbs least.
        yield compare_numbers(
            "objective",
            name,
            own.cpu_s / bare.cpu_s,
            unit="share",
            repeats=bench.rounds,
            note=f"own processor time {own.cpu_s * 1e3:.2f} ms, as a share of a bare step",
        )


def _list_works(trainer: Trainer) -> dict[str, Work]:
    task = trainer.task
    assert isinstance(task, DenoiserTask)
    batch = next(trainer.feed.steps(0, 0, 1))[0][0]
    assert batch.latents is not None
    latent_BCFHW = task.vae.normalize(batch.latents[0])
    prediction = torch.randn(latent_BCFHW.shape, generator=stream(0, "prediction")).requires_grad_()
    works: dict[str, Work] = {
        "bare step": plain_step(trainer),
        "full step": _full_step(trainer, task, batch),
        "bare: one draw, flow, mean squared error": _bare_work(latent_BCFHW, prediction),
        "noise and latent from keyed streams": _draw_work(latent_BCFHW, batch),
    }
    for name, settings in FEATURES.items():
        works[name] = _feature_work(parse_objective(settings), latent_BCFHW, prediction, batch)
    return works | _mask_works(batch, task)


def _bare_work(latent_BCFHW: Tensor, prediction: Tensor) -> Work:
    def work() -> None:
        noise, time_B = torch.randn_like(latent_BCFHW), torch.rand(len(latent_BCFHW))
        mix = time_B[:, None, None, None, None]
        torch.add((1 - mix) * latent_BCFHW, mix * noise)
        torch.autograd.grad(F.mse_loss(prediction, noise - latent_BCFHW), prediction)

    return work


def _draw_work(latent_BCFHW: Tensor, batch: Batch) -> Work:
    shape = (2, *latent_BCFHW.shape[1:])
    return lambda: draw_normal(0, "noise", batch, shape, latent_BCFHW.device)


def _feature_work(section: ObjectiveSection, latent_BCFHW: Tensor, prediction: Tensor, batch: Batch) -> Work:
    """All that the task does with an objective around the model; plain noise is at hand."""
    objective = build_objective(section)
    plain_BCFHW = draw_normal(0, "noise", batch, tuple(latent_BCFHW.shape[1:]), latent_BCFHW.device)

    def work() -> None:
        noise_BCFHW, perturbation_BCFHW = apply_noise_options(objective.noise, plain_BCFHW, 0, batch)
        timestep_B = objective.timesteps(draw_levels(0, batch, objective.noise.stratified_levels), latent_BCFHW)
        noised = add_noise(objective, latent_BCFHW, noise_BCFHW, timestep_B, perturbation_BCFHW)
        error_B = weighted_error_B(prediction, noised, motion_share=objective.motion_share)
        torch.autograd.grad(error_B.mean(), prediction)

    return work


def _mask_works(batch: Batch, task: DenoiserTask) -> dict[str, Work]:
    """The laws of known parts, of as many clips of pixels."""
    bucket, vae = batch.bucket, task.vae
    shape = (bucket.frames, bucket.height, bucket.width)

    def draw_all(draw: Callable[[MaskRandom], object]) -> Work:
        def work() -> None:
            for ordinal in batch.sample_indices.tolist():
                draw(MaskRandom(stream(0, "known", batch.epoch, ordinal)))

        return work

    return {
        "known ends (Open-Sora 2.0)": draw_all(
            lambda dice: draw_end_mask(shape, dice.chance(), END_SHARES, stride=vae.strides[0], causal=vae.causal)
        ),
        "known frames (Open-Sora-Plan)": draw_all(lambda dice: draw_frame_mask(shape, dice)),
        "known regions (CogVideoX-Fun)": draw_all(lambda dice: draw_region_mask(shape, dice)),
    }


def _full_step(trainer: Trainer, task: DenoiserTask, batch: Batch) -> Work:
    """Our step with everything on, on a batch that is read already."""
    everything = replace(task, objective=build_objective(parse_objective(EVERYTHING)))
    (phase,), (update,) = everything.phases(trainer.recipe.optim), trainer.stepper.updates
    stepper = replace(trainer.stepper, updates=[replace(update, phase=phase)])
    numbers = count(1)
    return lambda: stepper.step(next(numbers), [batch])
