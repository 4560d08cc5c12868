"""Sampling by name: Euler steps (DDIM), Heun's method, or a scheduler of diffusers.

Shape letters: B batch, C channels, F frames, H height, W width.

A step takes latent and noise apart, as the prediction says, and joins them with the next coefficients. For a DDPM this
is deterministic DDIM (Song et al. 2021, eta 0), for flow matching Euler's method along the predicted velocity, for EDM
Euler's method of the probability flow (Karras et al. 2022, algorithm 1 without churn and correction).
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.diffusion.objectives import Coefficients, Objective
from frameloom.diffusion.tables import SAMPLERS

Predict = Callable[[Tensor, Tensor], Tensor]
"""(x_BCFHW, timestep_B) -> prediction_BCFHW. A sampler calls it once per step, in order; Heun's method twice."""

OnStep = Callable[[int, Tensor], None]
"""Called after each sampling step with the number of steps done and the noisy latent so far."""

_SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_ancestral": "EulerAncestralDiscreteScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
}


@dataclass(frozen=True)
class Start:
    """A latent to begin from instead of noise alone: of all steps, the last `strength` are walked."""

    latent_BCFHW: Tensor
    strength: float

    def skip(self, num_steps: int) -> int:
        """Steps left out; at least one is walked."""
        return num_steps - max(1, min(int(num_steps * self.strength), num_steps))


def check_sampler(name: str, objective: Objective) -> None:
    """ConfigError with the names that there are, when the objective cannot be sampled so."""
    known = SAMPLERS[objective.kind]
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
    generators: Sequence[torch.Generator] = (),
    start: Start | None = None,
    on_step: OnStep = lambda count, x_BCFHW: None,
) -> Tensor:
    """Walk from noise, or from `start` with this noise on it, to a latent, in float32 or the wider dtype of `noise`.

    `generators`, one per sample, give the noise that some samplers add on the way.
    """
    check_sampler(name, objective)
    noise = noise_BCFHW.to(torch.promote_types(noise_BCFHW.dtype, torch.float32))
    skip = 0 if start is None else start.skip(num_steps)
    # Of all steps the first level is noise alone, or so near to it that the latent under it does not matter.
    origin = None if start is None or skip == 0 else start.latent_BCFHW.to(noise)
    if name in ("default", "heun") or (name == "euler" and objective.kind != "v"):
        steps = list(enumerate(objective.steps(num_steps, noise)))[skip:]
        return _walk(objective, predict, noise, origin, steps, on_step, is_heun=name == "heun")
    scheduler = build_scheduler(name, objective, noise, num_steps)
    return _walk_scheduler(scheduler, predict, noise, origin, skip, on_step, list(generators))


def _walk(
    objective: Objective,
    predict: Predict,
    noise: Tensor,
    origin: Tensor | None,
    steps: Sequence[tuple[int, tuple[float, float | None]]],
    on_step: OnStep,
    *,
    is_heun: bool,
) -> Tensor:
    alpha, sigma, *_ = _numbers(objective, steps[0][1][0])
    # Noise alone is as wide as training's noisy latents are for latents of unit size.
    x = noise * math.hypot(alpha, sigma) if origin is None else alpha * origin + sigma * noise
    for step, (timestep, next_timestep) in steps:
        now, then = _numbers(objective, timestep), _numbers(objective, next_timestep)
        prediction = _predict_at(predict, x, timestep)
        (alpha, sigma, of_latent, of_noise), (next_alpha, next_sigma, *_) = now, then
        size = alpha * of_noise - sigma * of_latent
        # Latent and noise as `Coefficients.split` finds them, joined with the next coefficients.
        ahead = (next_alpha * of_noise - next_sigma * of_latent) / size * x
        ahead = ahead + (next_sigma * alpha - next_alpha * sigma) / size * prediction
        if is_heun and next_timestep is not None and (step, (timestep, next_timestep)) != steps[-1]:
            # The mean of the slopes at both ends of the step; the last one, to no noise, is Euler's.
            before = now.split(x, prediction)
            after = then.split(ahead, _predict_at(predict, ahead, next_timestep))
            is_rescaled = objective.is_rescaled
            rise = 0.0 if is_rescaled else next_alpha - alpha
            fall = next_sigma - (next_alpha / alpha if is_rescaled else 1.0) * sigma
            ahead = ahead + rise / 2 * (after[0] - before[0]) + fall / 2 * (after[1] - before[1])
        x = ahead
        on_step(step + 1, x)
    return x


def _numbers(objective: Objective, timestep: float | None) -> Coefficients:
    """Coefficients as plain numbers; those of the latent without noise where there is no timestep."""
    found: Any = (1.0, 0.0, 0.0, 0.0)
    if timestep is not None:
        found = (float(part) for part in objective.coefficients(torch.tensor([timestep], dtype=torch.float64)))
    return Coefficients(*found)


def _predict_at(predict: Predict, x: Tensor, timestep: float) -> Tensor:
    return predict(x, torch.full((len(x),), timestep, dtype=torch.float32, device=x.device)).to(x.dtype)


def build_scheduler(name: str, objective: Objective, latent: Tensor, num_steps: int) -> Any:
    """A scheduler of diffusers with the schedule, prediction and spacing of the objective, set for a walk."""
    # Imported here: it takes a second, and most samplings do not need it.
    import diffusers

    make = getattr(diffusers, _SCHEDULERS[name])
    known = inspect.signature(make.__init__).parameters
    with warnings.catch_warnings():
        # Its conversions between torch and numpy are in a form that numpy will drop.
        warnings.simplefilter("ignore", DeprecationWarning)
        settings = objective.scheduler_settings(latent).items()
        scheduler = make(**{key: value for key, value in settings if key in known})
        scheduler.set_timesteps(num_steps, device=latent.device)
    return scheduler


def _walk_scheduler(
    scheduler: Any,
    predict: Predict,
    noise: Tensor,
    origin: Tensor | None,
    skip: int,
    on_step: OnStep,
    generators: list[torch.Generator],
) -> Tensor:
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(skip)
    x: Tensor = noise * scheduler.init_noise_sigma
    if origin is not None:
        x = scheduler.add_noise(origin, noise, scheduler.timesteps[skip : skip + 1])
    extra = {"generator": generators} if "generator" in inspect.signature(scheduler.step).parameters else {}
    for step, index in list(enumerate(scheduler.timesteps))[skip:]:
        # For flow matching the exact time, because the scheduler's timestep is rounded.
        is_flow = scheduler.config.get("use_flow_sigmas", False)
        timestep = float(scheduler.sigmas[step] if is_flow else index / scheduler.config.num_train_timesteps)
        prediction = _predict_at(predict, scheduler.scale_model_input(x, index), timestep)
        x = cast(Tensor, scheduler.step(prediction.to(x.dtype), index, x, return_dict=False, **extra)[0])
        on_step(step + 1, x)
    return x
