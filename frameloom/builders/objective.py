"""Objectives from a recipe section or from the scheduler file of a published pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frameloom.config.schema.objective import ObjectiveSection, beta_range
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.text_files import read_object
from frameloom.diffusion.ddpm import DDPMObjective, Prediction
from frameloom.diffusion.edm import EDMObjective
from frameloom.diffusion.flow import FlowObjective
from frameloom.diffusion.noise_levels import LevelBias
from frameloom.diffusion.objective import NoiseSettings, Objective

_SCHEDULER = Path("scheduler", "scheduler_config.json")
_PREDICTIONS: dict[str, Prediction] = {"v_prediction": "v", "epsilon": "epsilon", "sample": "sample"}


def build_objective(section: ObjectiveSection) -> Objective:
    """What a denoiser learns, at which noise levels, and how it is sampled."""
    noise = NoiseSettings(
        offset=section.noise_offset,
        offset_per=section.noise_offset_per,
        perturbation=section.input_perturbation,
        num_strata=section.stratified_levels,
    )
    if section.kind == "flow":
        return FlowObjective(
            sigma_min=section.sigma_min,
            law=section.distribution,
            logit_mean=section.logit_mean,
            logit_std=section.logit_std,
            mode_scale=section.mode_scale,
            num_levels=section.num_levels,
            shift=section.shift,
            patch_area=section.shift_patch,
            sampling_patch_area=section.sampling_shift_patch,
            base_tokens=section.shift_tokens,
            weighting=section.weighting,
            motion_share=section.motion_share,
            noise=noise,
        )
    if section.kind == "edm":
        return EDMObjective(
            **section.edm.model_dump(),
            max_weight=section.min_snr_gamma,
            motion_share=section.motion_share,
            noise=noise,
        )
    beta_start, beta_end = beta_range(section)
    return DDPMObjective(
        beta_schedule=section.betas,
        beta_start=beta_start,
        beta_end=beta_end,
        zero_terminal_snr=section.kind == "v" if section.zero_terminal_snr is None else section.zero_terminal_snr,
        prediction=section.kind,
        snr_gamma=section.min_snr_gamma,
        snr_shift=section.snr_shift,
        spacing=section.spacing,
        motion_share=section.motion_share,
        bias=LevelBias(**section.bias.model_dump()) if section.bias is not None else None,
        within=section.levels,
        noise=noise,
    )


def find_objective(path: Path) -> DDPMObjective | None:
    """The schedule that a pipeline's own scheduler file describes; None where there is none."""
    file = path / _SCHEDULER
    if not file.is_file():
        return None
    return read_scheduler(read_object(file, error=CheckpointError, fix="download it again"))


def read_scheduler(config: Mapping[str, Any]) -> DDPMObjective:
    """The DDPM that a scheduler file describes.

    `snr_shift_scale` is left out: only CogVideoX's own samplers apply it, the training and the default sampler of
    CogVideoX-Fun read the same file and do not.
    """
    prediction = _PREDICTIONS.get(config.get("prediction_type", "epsilon"))
    if prediction is None or config.get("trained_betas") is not None:
        raise ConfigError(
            f"scheduler file: prediction_type is {config.get('prediction_type')!r} and trained_betas is "
            f"{config.get('trained_betas')!r}; we know {', '.join(_PREDICTIONS)} and betas that follow a rule"
        )
    return DDPMObjective(
        num_train_timesteps=config.get("num_train_timesteps", 1000),
        beta_schedule=config.get("beta_schedule", "linear"),
        beta_start=config.get("beta_start", 1e-4),
        beta_end=config.get("beta_end", 0.02),
        zero_terminal_snr=config.get("rescale_betas_zero_snr", False),
        prediction=prediction,
        spacing=config.get("timestep_spacing", "leading"),
        step_to="even",
    )
