"""Learning-rate schedules: pure functions from the optimizer step to a factor of the base rate.

A step is counted from 0 and means a real optimizer step, whatever the accumulation or the number of processes, so a
resumed run needs nothing but its step.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

from frameloom.core.errors import ConfigError

Schedule = Callable[[int], float]
ScheduleName = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "multi_step"
]


def warmup_factor(step: int, *, num_warmup_steps: int, first_share: float = 0.0, idle_start: bool = False) -> float:
    """Linear rise from `first_share` to 1, and 1 from step `num_warmup_steps` on.

    By default the first step already moves: (step + 1) / (num_warmup_steps + 1) of the way, as in Open-Sora 2.0.
    With `idle_start` it is step / num_warmup_steps, as in diffusers, whose first step has rate `first_share`.
    """
    if step >= num_warmup_steps:
        return 1.0
    extra = 0 if idle_start else 1
    return first_share + (1 - first_share) * (step + extra) / (num_warmup_steps + extra)


def decay_progress(step: int, *, num_warmup_steps: int, num_steps: int) -> float:
    """0 at the end of the warm-up, 1 at `num_steps` and after it."""
    return min(max((step - num_warmup_steps) / max(num_steps - num_warmup_steps, 1), 0.0), 1.0)


def cosine_factor(progress: float, *, min_share: float = 0.0) -> float:
    """Half a cosine wave from 1 down to `min_share`."""
    return min_share + (1 - min_share) * 0.5 * (1 + math.cos(math.pi * progress))


def linear_factor(progress: float, *, min_share: float = 0.0) -> float:
    """A straight line from 1 down to `min_share`."""
    return min_share + (1 - min_share) * (1 - progress)


def restarting_factor(progress: float, *, num_cycles: int = 1, min_share: float = 0.0) -> float:
    """Half a cosine wave after the other, each from 1 down to `min_share`."""
    return cosine_factor(1.0 if progress >= 1 else num_cycles * progress % 1, min_share=min_share)


def polynomial_factor(progress: float, *, power: float = 1.0, min_share: float = 0.0) -> float:
    """From 1 down to `min_share`; with a power above 1 steep at first."""
    return min_share + (1 - min_share) * math.pow(1 - progress, power)


def multi_step_factor(step: int, *, milestones: Sequence[int], gamma: float = 0.9, min_share: float = 0.0) -> float:
    """`gamma` to the number of milestones up to and with `step`, but never below `min_share`."""
    return max(gamma ** sum(milestone <= step for milestone in milestones), min_share)


def build_schedule(
    name: ScheduleName,
    *,
    num_steps: int,
    num_warmup_steps: int = 0,
    min_share: float = 0.0,
    first_share: float = 0.0,
    idle_start: bool = False,
    num_decay_steps: int | None = None,
    num_cycles: int = 1,
    power: float = 1.0,
    milestones: Sequence[int] = (),
    gamma: float = 0.9,
) -> Schedule:
    """The schedule of a run of `num_steps`. Decaying schedules stay at `min_share` after their end.

    The fall takes `num_decay_steps` after the warm-up, or all that are left. `num_cycles` is that of
    "cosine_with_restarts", `power` that of "polynomial", `milestones` (steps of the run) and `gamma` of "multi_step".
    "constant" has no warm-up, even where `num_warmup_steps` is given: that is what the name means in diffusers.
    """
    if name not in get_args(ScheduleName):
        _refuse_name(name)
    if name == "constant":
        return _always_one
    warmup = partial(warmup_factor, num_warmup_steps=num_warmup_steps, first_share=first_share, idle_start=idle_start)
    if name == "constant_with_warmup":
        return warmup
    if name == "multi_step":
        fall: Schedule = partial(multi_step_factor, milestones=tuple(milestones), gamma=gamma, min_share=min_share)
    else:
        shapes: dict[str, Callable[..., float]] = {
            "linear": linear_factor,
            "cosine": cosine_factor,
            "cosine_with_restarts": partial(restarting_factor, num_cycles=num_cycles),
            "polynomial": partial(polynomial_factor, power=power),
        }
        shape = shapes[name]
        end = num_steps if num_decay_steps is None else num_warmup_steps + num_decay_steps

        def fall(step: int) -> float:
            progress = decay_progress(step, num_warmup_steps=num_warmup_steps, num_steps=end)
            return shape(progress, min_share=min_share)

    return lambda step: warmup(step) if step < num_warmup_steps else fall(step)


def _always_one(step: int) -> float:
    return 1.0


def _refuse_name(name: str) -> None:
    known = get_args(ScheduleName)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else "choose one of " + ", ".join(known)
    raise ConfigError(f"learning-rate schedule '{name}' is unknown; {hint}")
