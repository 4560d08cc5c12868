"""One optimizer step: tensors in, numbers out; no files, no processes.

The loss of a step is the mean over its samples, whatever the number of micro-batches they come in, so
an accumulation split changes nothing but the order of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from frameloom.data.batch import Batch
from frameloom.train.clipping import FadingLimit, SpikeGuard
from frameloom.train.ema import EMA
from frameloom.train.optimizer import clip_within_step


class Task(Protocol):
    """What is trained: gives the loss of every sample of a micro-batch, and named parts of it for the log."""

    @property
    def model(self) -> nn.Module: ...

    def losses(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]: ...


@dataclass(frozen=True)
class StepResult:
    """`is_finite` False or `is_spike` means that nothing was changed: weights, averages, optimizer are as before."""

    values: dict[str, float]
    is_finite: bool
    is_spike: bool = False


@dataclass
class Stepper:
    """Forward, backward, clip, update. `lr_at` gives the learning rate of a step (the first one is 1)."""

    task: Task
    optimizer: torch.optim.Optimizer
    ema: EMA | None
    lr_at: Callable[[int], float]
    clip_norm: float | None
    device_type: str
    bf16: bool
    fade: FadingLimit | None = None
    """a limit that follows step and norm, instead of `clip_norm`"""
    guard: SpikeGuard | None = None

    def step(self, number: int, batches: Sequence[Batch]) -> StepResult:
        num_samples = sum(len(batch.rows) for batch in batches)
        totals: dict[str, Tensor] = {}
        for batch in batches:
            with torch.autocast(self.device_type, torch.bfloat16, enabled=self.bf16):
                losses_B, parts = self.task.losses(batch)
            loss = losses_B.sum() / num_samples
            torch.autograd.backward(loss)
            for name, part_B in {"loss": losses_B, **parts}.items():
                part = part_B.detach().sum() / num_samples
                totals[name] = totals[name] + part if name in totals else part
        return self._update(number, totals)

    def _update(self, number: int, totals: dict[str, Tensor]) -> StepResult:
        # The rules count steps from 0.
        limit = self.clip_norm if self.fade is None else partial(self.fade.for_norm, number - 1)
        norm = clip_within_step(self.optimizer, limit)
        is_finite = bool(torch.isfinite(norm) & torch.isfinite(totals["loss"]))
        is_spike = self.guard is not None and is_finite and self.guard.is_spike(float(norm))
        lr = self.lr_at(number)
        if is_finite and not is_spike:
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_factor"]
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update(number)
        self.optimizer.zero_grad(set_to_none=True)
        values = {name: float(total) for name, total in totals.items()}
        if self.guard is not None:
            values["spikes"] = self.guard.num_spikes
        return StepResult({**values, "grad_norm": float(norm), "lr": lr}, is_finite, is_spike)
