"""What the objective's features cost beside a bare loop: noise, target, weight, masks and the loss, without the model.

Each row is the work of one feature on the same latents: drawing, mixing, the loss and its gradient back to the
prediction. It is told in processor time, which a busy machine disturbs least, and as a share of a bare training step
(forward, backward and AdamW of the demo's denoiser). All of them take turns within one run, and medians are compared; a
whole step with everything on is set against a bare one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.bench.step import plain_step, prepare_demo
from frameloom.config.objective_settings import ObjectiveSection
from frameloom.core.random import stream
from frameloom.data.batch import Batch
from frameloom.diffusion.end_masks import END_SHARES, draw_end_mask
from frameloom.diffusion.masks import StreamDice, draw_frame_mask, draw_region_mask
from frameloom.generate.parts import build_objective
from frameloom.train.build import build_trainer
from frameloom.train.denoiser import DenoiserTask
from frameloom.train.draws import draw_normal
from frameloom.train.loop import Trainer
from frameloom.train.noising import finish_noise
from frameloom.train.run_folder import RunFolder
from frameloom.train.step import Stepper

Work = Callable[[], object]

EVERYTHING: dict[str, Any] = {
    "kind": "v",
    "min_snr_gamma": 5.0,
    "noise_offset": 0.05,
    "input_perturbation": 0.1,
    "strata": 8,
    "bias": {"strategy": "later", "multiplier": 2.0},
    "motion_share": 0.25,
}
FEATURES: dict[str, dict[str, Any]] = {
    "flow, uniform levels": {"law": "uniform"},
    "flow, logit-normal levels": {},
    "flow, levels by mode, sd3 shift, cosmap": {"law": "mode", "shift": "sd3", "weighting": "cosmap"},
    "epsilon": {"kind": "epsilon"},
    "v": {"kind": "v"},
    "v, min-SNR weights": {"kind": "v", "min_snr_gamma": 5.0},
    "v, biased levels": {"kind": "v", "bias": {"strategy": "later", "multiplier": 2.0}},
    "v, levels in 8 strata": {"kind": "v", "strata": 8},
    "v, noise offset": {"kind": "v", "noise_offset": 0.05},
    "v, input perturbation": {"kind": "v", "input_perturbation": 0.1},
    "v, motion loss": {"kind": "v", "motion_share": 0.25},
    "edm": {"kind": "edm"},
    "v, all of these": EVERYTHING,
}


@dataclass(frozen=True)
class Cost:
    """Median processor seconds of a feature, and as a share of a bare step."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Comparison:
    costs: list[Cost]
    bare_step_s: float
    full_step_s: float
    full_step_ratio: float
    """of a step with everything on, on a batch at hand, to a bare one: the median over the rounds"""
    rounds: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> list[str]:
        return [
            f"objective of 32 clips of the demo, {self.rounds} rounds in turn, processor time, medians",
            f"  {'':40} {'own work':>11}  of a bare step",
            *(f"  {cost.name:40} {cost.seconds * 1e3:8.2f} ms  {cost.share:8.2%}" for cost in self.costs),
            f"  a bare step takes {self.bare_step_s * 1e3:.1f} ms; ours with everything on "
            f"{self.full_step_s * 1e3:.1f} ms, {self.full_step_ratio:.3f} times as long",
        ]


def compare_objectives(rounds: int = 40, warmup: int = 3, num_clips: int = 40) -> Comparison:
    """Every feature in turn on the latents of one batch of the demo."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        recipe = prepare_demo(Path(folder), steps=warmup + rounds, num_clips=num_clips)
        trainer = build_trainer(recipe, RunFolder(Path(folder) / "run"), first_step=1)
        for tracker in trainer.trackers:
            stack.callback(tracker.close)
        works = _list_works(trainer)
        for _ in range(warmup):
            _time_all(works)
        times = [_time_all(works) for _ in range(rounds)]
    medians = {name: statistics.median(each[name] for each in times) for name in works}
    bare, full = medians.pop("bare step"), medians.pop("full step")
    return Comparison(
        [Cost(name, seconds, seconds / bare) for name, seconds in medians.items()],
        bare,
        full,
        statistics.median(each["full step"] / each["bare step"] for each in times),
        rounds,
    )


def _time_all(works: dict[str, Work]) -> dict[str, float]:
    times = {}
    for name, work in works.items():
        start = time.process_time()
        work()
        times[name] = time.process_time() - start
    return times


def _list_works(trainer: Trainer) -> dict[str, Work]:
    task = trainer.built.task
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
        works[name] = _feature_work(ObjectiveSection(**settings), latent_BCFHW, prediction, batch)
    mask_BFHW = torch.ones(len(latent_BCFHW), *latent_BCFHW.shape[2:])
    mask_BFHW[:, -1:] = 0
    works["v, mask of padded cells"] = _feature_work(
        ObjectiveSection(kind="v"), latent_BCFHW, prediction, batch, mask_BFHW
    )
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


def _feature_work(
    section: ObjectiveSection, latent_BCFHW: Tensor, prediction: Tensor, batch: Batch, mask_BFHW: Tensor | None = None
) -> Work:
    """All that the task does with an objective around the model; plain noise is at hand."""
    objective, device = build_objective(section), latent_BCFHW.device
    plain_BCFHW = draw_normal(0, "noise", batch, tuple(latent_BCFHW.shape[1:]), device)

    def work() -> None:
        drawn = finish_noise(objective.noise, plain_BCFHW, 0, batch, device)
        noised = objective.add_noise(latent_BCFHW, drawn.noise_BCFHW, drawn.draw_B, drawn.perturbation_BCFHW)
        torch.autograd.grad(objective.loss_B(prediction, noised, mask_BFHW).mean(), prediction)

    return work


def _mask_works(batch: Batch, task: DenoiserTask) -> dict[str, Work]:
    """The laws of known parts, of as many clips of pixels."""
    bucket, vae = batch.bucket, task.vae
    shape = (bucket.frames, bucket.height, bucket.width)

    def draw_all(draw: Callable[[StreamDice], object]) -> Work:
        def work() -> None:
            for ordinal in batch.ordinals.tolist():
                draw(StreamDice(stream(0, "known", batch.epoch, ordinal)))

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
    assert isinstance(trainer.stepper, Stepper)
    stepper = replace(trainer.stepper, task=replace(task, objective=build_objective(ObjectiveSection(**EVERYTHING))))
    numbers = count(1)
    return lambda: stepper.step(next(numbers), [batch])
