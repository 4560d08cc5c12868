"""Samplers whose steps are those of diffusers, on the noise levels of our objectives.

Shape letters: B batch, C channels, F frames, H height, W width, T training timesteps.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from frameloom.diffusion.ddpm import DDPMObjective, make_betas, shift_snr
from frameloom.diffusion.flow import FlowObjective
from frameloom.diffusion.objective import Objective, OnStep, Predict

_CLASSES = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_ancestral": "EulerAncestralDiscreteScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
}
_PREDICTIONS = {"v": "v_prediction", "epsilon": "epsilon", "sample": "sample"}


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
    """What the model is told; of flow matching the very time, of which the scheduler's timestep is rounded."""
    if isinstance(objective, FlowObjective):
        return torch.full((x.shape[0],), float(scheduler.sigmas[step]), dtype=torch.float32, device=x.device)
    assert isinstance(objective, DDPMObjective)
    return objective.timestep_B(timestep.to(x.device).expand(x.shape[0]))
