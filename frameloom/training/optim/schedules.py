"""Learning-rate schedules: pure functions from the optimizer step to a factor of the base rate.

A step is counted from 0 and means a real optimizer step, whatever the accumulation or the number of processes, so a
resumed run needs nothing but its step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from frameloom.config.schema.optim import ScheduleSection

Schedule = Callable[[int], float]


def build_schedule(section: ScheduleSection, num_steps: int) -> Schedule:
    """The schedule of a run of `num_steps`. Decaying schedules stay at `min_share` after their end.

    By default the first step of the warm-up already moves: (step + 1) / (warmup_steps + 1) of the way, as in
    Open-Sora 2.0. With `idle_start` it is step / warmup_steps, as in diffusers, whose first step has `start_share`.
    """
    warmup, first, least = section.warmup_steps, section.start_share, section.min_share
    end = num_steps if section.decay_steps is None else warmup + section.decay_steps
    extra = 0 if section.idle_start else 1

    def factor(step: int) -> float:
        if step < warmup:
            return first + (1 - first) * (step + extra) / (warmup + extra)
        if section.name == "constant":
            return 1.0
        if section.name == "multi_step":
            return max(section.gamma ** sum(milestone <= step for milestone in section.milestones), least)
        progress = min(max((step - warmup) / max(end - warmup, 1), 0.0), 1.0)
        return least + (1 - least) * fall(progress)

    def fall(progress: float) -> float:
        """From 1 down to 0."""
        if section.name == "linear":
            return 1 - progress
        if section.name == "polynomial":
            return math.pow(1 - progress, section.power)
        if section.name == "cosine_with_restarts":
            progress = 1.0 if progress >= 1 else section.num_cycles * progress % 1
        return 0.5 * (1 + math.cos(math.pi * progress))

    return factor
