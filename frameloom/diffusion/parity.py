"""Golden cases of objectives, schedules and masks: what a file holds says which of them it is."""

from __future__ import annotations

from collections.abc import Callable

from frameloom.core.parity import ParityCase, ParityOutput
from frameloom.diffusion import parity_ddpm, parity_flow, parity_masks

Kind = tuple[Callable[[ParityCase], bool], Callable[[ParityCase], list[ParityOutput]]]

_KINDS: tuple[Kind, ...] = (
    (parity_ddpm.is_scheduler, parity_ddpm.run_scheduler),
    (parity_ddpm.is_loss, parity_ddpm.run_loss),
    (parity_ddpm.is_train_loss, parity_ddpm.run_train_loss),
    (parity_ddpm.is_timestep_sampling, parity_ddpm.run_timestep_sampling),
    (parity_flow.is_time_shift, parity_flow.run_time_shift),
    (parity_flow.is_schedule, parity_flow.run_schedule),
    (parity_masks.is_draws, parity_masks.run_draws),
    (parity_masks.is_statistics, parity_masks.run_statistics),
)


def matches(case: ParityCase) -> bool:
    return any(is_kind(case) for is_kind, _ in _KINDS)


def run(case: ParityCase) -> list[ParityOutput]:
    return next(run_kind for is_kind, run_kind in _KINDS if is_kind(case))(case)
