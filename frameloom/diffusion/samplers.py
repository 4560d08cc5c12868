"""From noise to a latent by name: the objective's own walk, Heun's, or a scheduler of diffusers.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.diffusion.ddpm import DDPMObjective
from frameloom.diffusion.edm import EDMObjective
from frameloom.diffusion.flow import FlowObjective
from frameloom.diffusion.objective import Objective, OnStep, Predict
from frameloom.diffusion.sampler_table import SAMPLERS


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
    from frameloom.diffusion.scheduler_samplers import run_scheduler

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
    """The change of x by noise level that the model sees."""
    level_B = torch.full((x.shape[0],), level, dtype=torch.float64, device=x.device)
    if isinstance(objective, EDMObjective):
        output = predict(x / math.hypot(level, objective.sigma_data), objective.timestep_B(level_B)).to(x.dtype)
        return (x - objective.find_latent(x, output, level)) / level
    return predict(x, level_B.float()).to(x.dtype)
