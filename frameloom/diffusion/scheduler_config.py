"""Objectives from the scheduler files that lie beside published checkpoints (`scheduler_config.json`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frameloom.core.errors import ConfigError
from frameloom.diffusion.ddpm import DDPMObjective, Prediction

_PREDICTIONS: dict[str, Prediction] = {"v_prediction": "v", "epsilon": "epsilon", "sample": "sample"}


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
