"""Objectives from a recipe section or from the scheduler file of a published pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frameloom.config.schema.objective import EDMObjectiveSection, FlowObjectiveSection, ObjectiveSection, beta_range
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.text_files import read_object
from frameloom.diffusion.objectives import (
    DDPMObjective,
    EDMObjective,
    FlowObjective,
    LevelBias,
    NoiseSettings,
    Objective,
)

_SCHEDULER = Path("scheduler", "scheduler_config.json")
_PREDICTIONS = {"v_prediction": "v", "epsilon": "epsilon", "sample": "sample"}


def build_objective(section: ObjectiveSection) -> Objective:
    """What a denoiser learns, at which noise levels, and how it is sampled."""
    values = section.model_dump(exclude={"bias", "edm"})
    noise = NoiseSettings(**_pick(values, NoiseSettings))
    if isinstance(section, FlowObjectiveSection):
        return FlowObjective(**_pick(values, FlowObjective), noise=noise)
    if isinstance(section, EDMObjectiveSection):
        return EDMObjective(
            **section.edm.model_dump(), max_weight=section.min_snr_gamma, motion_share=section.motion_share, noise=noise
        )
    values["beta_start"], values["beta_end"] = beta_range(section)
    if section.zero_terminal_snr is None:
        values["zero_terminal_snr"] = section.kind == "v"
    return DDPMObjective(
        **_pick(values, DDPMObjective),
        beta_schedule=section.betas,
        prediction=section.kind,
        snr_gamma=section.min_snr_gamma,
        bias=LevelBias(**section.bias.model_dump()) if section.bias is not None else None,
        within=section.levels,
        noise=noise,
    )


def _pick(values: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """The values that a dataclass has fields of the same name for."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


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
    objective = DDPMObjective(
        num_train_timesteps=config.get("num_train_timesteps", 1000),
        beta_schedule=config.get("beta_schedule", "linear"),
        beta_start=config.get("beta_start", 1e-4),
        beta_end=config.get("beta_end", 0.02),
        zero_terminal_snr=config.get("rescale_betas_zero_snr", False),
        prediction=prediction,  # type: ignore[arg-type]
        spacing=config.get("timestep_spacing", "leading"),
        step_to="even",
    )
    _refuse_unsupported(objective)
    return objective


def _refuse_unsupported(objective: DDPMObjective) -> None:
    """What the rules of recipes refuse, of a file."""
    problems = []
    allowed = {"beta_schedule": ("linear", "scaled_linear"), "spacing": ("trailing", "leading", "linspace")}
    for name, values in allowed.items():
        if getattr(objective, name) not in values:
            problems.append(
                f"scheduler file: {name} is {getattr(objective, name)!r}; we know {', '.join(values)}, choose a "
                "pipeline with one of these"
            )
    if objective.zero_terminal_snr and objective.prediction == "epsilon":
        problems.append(
            "scheduler file: rescale_betas_zero_snr with prediction 'epsilon' divides by zero at the last timestep; "
            "choose a pipeline with prediction 'v' or 'sample', or switch rescale_betas_zero_snr off"
        )
    if objective.zero_terminal_snr and objective.spacing == "leading":
        problems.append(
            "scheduler file: timestep_spacing 'leading' never visits the last timestep, which rescale_betas_zero_snr "
            "needs; choose 'trailing'"
        )
    if problems:
        raise ConfigError(problems)
