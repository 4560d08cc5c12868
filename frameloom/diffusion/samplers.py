"""Sampling by name: an objective's own sampler, Heun's method, or a scheduler of diffusers.

Shape letters: B batch, C channels, F frames, H height, W width, T training timesteps.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.diffusion.ddpm import DDPMObjective, make_betas, shift_snr
from frameloom.diffusion.edm import EDMObjective
from frameloom.diffusion.flow import FlowObjective
from frameloom.diffusion.objective import Objective, OnStep, Predict
from frameloom.diffusion.sampler_table import SAMPLERS

_CLASSES = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_ancestral": "EulerAncestralDiscreteScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
}
_PREDICTIONS = {"v": "v_prediction", "epsilon": "epsilon", "sample": "sample"}


@dataclass(frozen=True)
class Start:
    """A latent to begin from instead of noise alone: of all steps, the last `strength` are walked."""

    latent_BCFHW: Tensor
    strength: float

    def skip(self, num_steps: int) -> int:
        """Steps left out; at least one is walked."""
        return num_steps - max(1, min(int(num_steps * self.strength), num_steps))


def list_samplers(objective: Objective) -> tuple[str, ...]:
    """Those of its kind; `default` is its own walk."""
    kinds: dict[type, str] = {FlowObjective: "flow", EDMObjective: "edm", DDPMObjective: "v"}
    return SAMPLERS[kinds[type(objective)]]


def check_sampler(name: str, objective: Objective) -> None:
    """ConfigError with the names that there are, when the objective cannot be sampled so."""
    known = list_samplers(objective)
    if name not in known:
        kind = type(objective).__name__.removesuffix("Objective")
        raise ConfigError(f"sample.sampler is '{name}', which {kind} models do not have; choose {', '.join(known)}")


@torch.no_grad()
def run_sampler(
    name: str,
    objective: Objective,
    predict: Predict,
    noise_BCFHW: Tensor,
    *,
    num_steps: int,
    generators: Sequence[torch.Generator],
    start: Start | None = None,
    on_step: OnStep | None = None,
) -> Tensor:
    """Walk from noise, or from `start` with this noise on it, to a latent.

    `generators`, one per sample, give the noise that some samplers add on the way.
    """
    check_sampler(name, objective)
    skip = 0 if start is None else start.skip(num_steps)
    if name == "default" or (name == "euler" and not isinstance(objective, DDPMObjective)):
        first = _begin(objective, noise_BCFHW, start, num_steps, skip)
        return objective.sample(predict, first, num_steps=num_steps, on_step=on_step, skip=skip)
    if name == "heun":
        first = _begin(objective, noise_BCFHW, start, num_steps, skip)
        return _walk_heun(objective, predict, first, num_steps=num_steps, skip=skip, on_step=on_step)

    return run_scheduler(
        name,
        objective,
        predict,
        noise_BCFHW,
        num_steps=num_steps,
        skip=skip,
        origin=None if start is None else start.latent_BCFHW,
        generators=generators,
        on_step=on_step,
    )


def _begin(objective: Objective, noise: Tensor, start: Start | None, num_steps: int, skip: int) -> Tensor:
    # All steps: the first level is noise alone, or so near to it that the latent under it does not matter.
    if start is None or skip == 0:
        return noise
    return objective.begin(start.latent_BCFHW, noise, num_steps=num_steps, skip=skip)


def _walk_heun(
    objective: Objective, predict: Predict, x_BCFHW: Tensor, *, num_steps: int, skip: int, on_step: OnStep | None
) -> Tensor:
    """Heun's method: the mean of the slopes at both ends of a step; the last one, to no noise, is Euler's.

    The model is called twice per step, but for the last.
    """
    x = x_BCFHW.to(torch.promote_types(x_BCFHW.dtype, torch.float32))
    if isinstance(objective, EDMObjective):
        levels = objective.schedule(num_steps)
        x = x if skip else x * math.hypot(1, levels[0])
    else:
        assert isinstance(objective, FlowObjective)
        levels = objective.schedule(x, num_steps)
    for step, (level, next_level) in list(enumerate(pairwise(levels)))[skip:]:
        slope = _find_slope(objective, predict, x, level)
        ahead = x + (next_level - level) * slope
        if next_level > 0:
            slope = (slope + _find_slope(objective, predict, ahead, next_level)) / 2
            ahead = x + (next_level - level) * slope
        x = ahead
        if on_step is not None:
            on_step(step + 1, x)
    return x


def _find_slope(objective: Objective, predict: Predict, x: Tensor, level: float) -> Tensor:
    """dx / d(noise level) as the model predicts it."""
    level_B = torch.full((x.shape[0],), level, dtype=torch.float64, device=x.device)
    if isinstance(objective, EDMObjective):
        output = predict(x / math.hypot(level, objective.sigma_data), objective.timestep_B(level_B)).to(x.dtype)
        return (x - objective.find_latent(x, output, level)) / level
    return predict(x, level_B.float()).to(x.dtype)


def build_scheduler(name: str, objective: Objective, latent: Tensor, num_steps: int) -> Any:
    """A scheduler of diffusers with the schedule, prediction and spacing of the objective, set for a walk."""
    # Imported here: it takes a second, and most samplings do not need it.
    import diffusers

    make = getattr(diffusers, _CLASSES[name])
    known = inspect.signature(make.__init__).parameters
    settings = _describe_flow(objective, latent) if isinstance(objective, FlowObjective) else _describe_ddpm(objective)
    with warnings.catch_warnings():
        # Its conversions between torch and numpy are in a form that numpy will drop.
        warnings.simplefilter("ignore", DeprecationWarning)
        scheduler = make(**{key: value for key, value in settings.items() if key in known})
        scheduler.set_timesteps(num_steps, device=latent.device)
    return scheduler


def _describe_flow(objective: FlowObjective, latent: Tensor) -> dict[str, Any]:
    alpha = objective.alpha(latent, patch_area=objective.sampling_patch_area)
    return {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": alpha}


def _describe_ddpm(objective: Objective) -> dict[str, Any]:
    assert isinstance(objective, DDPMObjective)
    settings: dict[str, Any] = {
        "num_train_timesteps": objective.num_train_timesteps,
        "beta_schedule": objective.beta_schedule,
        "beta_start": objective.beta_start,
        "beta_end": objective.beta_end,
        "rescale_betas_zero_snr": objective.zero_terminal_snr,
        "prediction_type": _PREDICTIONS[objective.prediction],
        "timestep_spacing": objective.spacing,
        "steps_offset": 1 if objective.spacing == "leading" else 0,
        "clip_sample": False,
    }
    if objective.snr_shift != 1:
        settings["trained_betas"] = _shifted_betas(objective)
    return settings


def _shifted_betas(objective: DDPMObjective) -> Any:
    """Betas of a schedule whose signal-to-noise ratio was shifted; diffusers makes its last level pure noise itself."""
    size = objective.num_train_timesteps
    betas_T = make_betas(objective.beta_schedule, objective.beta_start, objective.beta_end, size, torch.float64)
    alpha_bar_T = shift_snr(torch.cumprod(1 - betas_T, dim=0), objective.snr_shift)
    before_T = torch.cat([alpha_bar_T.new_ones(1), alpha_bar_T[:-1]])
    return (1 - alpha_bar_T / before_T).numpy()


@torch.no_grad()
def run_scheduler(
    name: str,
    objective: Objective,
    predict: Predict,
    noise_BCFHW: Tensor,
    *,
    num_steps: int,
    skip: int,
    origin: Tensor | None,
    generators: Sequence[torch.Generator],
    on_step: OnStep | None,
) -> Tensor:
    """Walk from noise, or from `origin` after the first `skip` steps, to a latent."""
    noise = noise_BCFHW.to(torch.promote_types(noise_BCFHW.dtype, torch.float32))
    scheduler = build_scheduler(name, objective, noise, num_steps)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(skip)
    if origin is None or skip == 0:
        x = noise * scheduler.init_noise_sigma
    else:
        x = scheduler.add_noise(origin.to(noise), noise, scheduler.timesteps[skip : skip + 1])
    extra = {"generator": list(generators)} if "generator" in inspect.signature(scheduler.step).parameters else {}
    x = cast(Tensor, x)
    for step, timestep in list(enumerate(scheduler.timesteps))[skip:]:
        seen = scheduler.scale_model_input(x, timestep)
        prediction = predict(seen, _find_level(objective, scheduler, step, timestep, x)).to(x.dtype)
        x = cast(Tensor, scheduler.step(prediction, timestep, x, return_dict=False, **extra)[0])
        if on_step is not None:
            on_step(step + 1, x)
    return x


def _find_level(objective: Objective, scheduler: Any, step: int, timestep: Tensor, x: Tensor) -> Tensor:
    """The model's timestep; for flow matching the exact time, because the scheduler's timestep is rounded."""
    if isinstance(objective, FlowObjective):
        return torch.full((x.shape[0],), float(scheduler.sigmas[step]), dtype=torch.float32, device=x.device)
    assert isinstance(objective, DDPMObjective)
    return objective.timestep_B(timestep.to(x.device).expand(x.shape[0]))
