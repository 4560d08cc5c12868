"""One optimizer step: tensors in, numbers out; no files, no processes.

The loss of a step is the mean over its samples, whatever the number of micro-batches they come in, so
an accumulation split changes nothing but the order of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from frameloom.core.hooks import notify
from frameloom.data.loading.batch import Batch
from frameloom.training.memory.oom_split import (
    BatchLimits,
    LoneMisfit,
    Misfit,
    OutOfRoom,
    cut_batch,
    find_misfit,
    release_memory,
)
from frameloom.training.optim.clipping import FadingLimit, SpikeGuard, clip_within_step
from frameloom.training.optim.ema import EMA
from frameloom.training.optim.optimizer import load_optimizer_tensors, optimizer_tensors, trained_names
from frameloom.training.optim.precision import LossScale, MasterWeights
from frameloom.training.peers import Peers


class Task(Protocol):
    """What is trained: gives the loss of every sample of a micro-batch, and named parts of it for the log."""

    @property
    def model(self) -> nn.Module: ...

    def losses(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]: ...


@dataclass(frozen=True)
class StepResult:
    """`is_finite` False or `is_spike` means that nothing was changed: weights, averages, optimizer are as before.

    `is_overflow`: not finite only because of the loss scale, which is smaller from now on.
    """

    values: dict[str, float]
    is_finite: bool
    is_spike: bool = False
    is_overflow: bool = False


class AnyStepper(Protocol):
    """What the loop asks of a stepper: a step, and what a checkpoint must hold of it besides the model.

    `tensors` are by group and name, the average of the weights in the group `ema`.
    """

    @property
    def ema(self) -> EMA | None: ...
    @property
    def limits(self) -> BatchLimits: ...

    def step(self, number: int, batches: Sequence[Batch]) -> StepResult: ...
    def try_out(self, pieces: Sequence[Batch]) -> Misfit | None: ...
    def tensors(self) -> dict[str, dict[str, Tensor]]: ...
    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...


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
    fp16: bool = False
    scaler: LossScale | None = None
    """what the loss is multiplied by before the backward pass, and gradients are divided by after it"""
    master: MasterWeights | None = None
    """the copies that `optimizer` and `ema` hold in the place of half-precision weights of the model"""
    peers: Peers = field(default_factory=Peers)
    """the other processes of the run"""
    limits: BatchLimits = field(default_factory=BatchLimits)
    """buckets whose micro-batches run in pieces, because they do not fit in memory"""
    undo: Callable[[], None] = lambda: None
    """puts back what a pass changes besides gradients, before a step is begun anew"""

    def autocast(self) -> AbstractContextManager[object]:
        """The dtype of the forward pass."""
        if not self.bf16 and not self.fp16:
            return nullcontext()
        return torch.autocast(self.device_type, torch.float16 if self.fp16 else torch.bfloat16)

    def step(self, number: int, batches: Sequence[Batch]) -> StepResult:
        """A step that does not fit in memory is begun anew with smaller pieces; LoneMisfit where others wait in it."""
        num_samples = self.peers.count_samples(batches)
        params = list_params(self.optimizer)
        while True:
            totals, misfit = self._run_passes(number, self._cut(batches), num_samples)
            try:
                joined = self.peers.join(totals, batches, params, misfit)
            except OutOfRoom as found:
                self._forget_passes()
                release_memory(self.device_type)
                self.limits.halve(found.misfits, step=number)
            else:
                return self._update(number, joined)

    def try_out(self, pieces: Sequence[Batch]) -> Misfit | None:
        """The passes of these pieces, of which nothing remains; what did not fit, if anything."""
        _, misfit = self._run_passes(0, pieces, sum(piece.size for piece in pieces))
        self._forget_passes()
        if misfit is not None:
            release_memory(self.device_type)
        return misfit

    def _cut(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        if not self.limits.most:
            return batches
        counts = self.peers.count_passes(batches, self.limits)
        return [piece for batch, count in zip(batches, counts, strict=True) for piece in cut_batch(batch, count)]

    def _run_passes(
        self, number: int, pieces: Sequence[Batch], num_samples: int
    ) -> tuple[dict[str, Tensor], Misfit | None]:
        """Sums of losses and of their parts, with gradients left in the model; or what did not fit in memory."""
        totals: dict[str, Tensor] = {}
        piece = pieces[0]
        try:
            for place, piece in enumerate(pieces):
                self.peers.expect(is_last=place == len(pieces) - 1)
                self._run_pass(number, piece, num_samples, totals)
        except (RuntimeError, MemoryError) as error:
            misfit = find_misfit(error, piece)
            if misfit is None:
                raise
            if self.peers.passes_together:
                raise LoneMisfit(misfit) from error
            return {}, misfit
        return totals, None

    def _run_pass(self, number: int, piece: Batch, num_samples: int, totals: dict[str, Tensor]) -> None:
        """Forward and backward; adds the loss and its parts to `totals`."""
        notify("pass", step=number, rank=self.peers.rank, bucket=piece.bucket.name, samples=piece.size)
        with self.autocast():
            losses_B, parts = self.task.losses(piece)
        # Divided by infinity, a filler takes part in all passes and leaves nothing.
        divisor = math.inf if piece.is_filler else num_samples
        loss = losses_B.sum() / divisor
        torch.autograd.backward(loss if self.scaler is None else loss * self.scaler.scale)
        if self.master is not None:
            self.master.take_gradients()
        found = {"loss": loss.detach(), **{name: part_B.detach().sum() / divisor for name, part_B in parts.items()}}
        for name, part in found.items():
            totals[name] = totals[name] + part if name in totals else part

    def _forget_passes(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.task.model.zero_grad(set_to_none=True)  # half-precision weights are not the optimizer's own
        self.undo()

    def _update(self, number: int, totals: dict[str, Tensor]) -> StepResult:
        # The rules count steps from 0.
        limit = self.clip_norm if self.fade is None else partial(self.fade.for_norm, number - 1)
        scale = 1.0 if self.scaler is None else self.scaler.scale
        norm = clip_within_step(self.optimizer, limit, scale=scale)
        # All numbers of a step in one transfer: the host waits for the device once.
        *found, grad_norm = torch.stack([*totals.values(), norm]).tolist()
        values: dict[str, float] = dict(zip(totals, found, strict=True))
        is_finite = math.isfinite(grad_norm) and math.isfinite(values["loss"])
        is_overflow = self.scaler is not None and self.scaler.adapt(is_finite=is_finite, loss=values["loss"])
        is_spike = self.guard is not None and is_finite and self.guard.is_spike(grad_norm)
        lr = self.lr_at(number)
        if is_finite and not is_spike:
            self._move(number, lr)
        self.optimizer.zero_grad(set_to_none=True)
        if self.guard is not None:
            values["spikes"] = self.guard.num_spikes
        if self.scaler is not None:
            values |= {"loss_scale": scale, "overflows": self.scaler.num_overflows}
        return StepResult({**values, "grad_norm": grad_norm, "lr": lr}, is_finite, is_spike, is_overflow)

    def _move(self, number: int, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        self.optimizer.step()
        if self.master is not None:
            self.master.write_back()
        if self.ema is not None:
            self.ema.update(number)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        tensors = {"optimizer": optimizer_tensors(self.optimizer, trained_names(self.optimizer))}
        if self.ema is not None:
            tensors["ema"] = self.ema.state_dict()
        return tensors if self.master is None else {**tensors, "master": self.master.tensors()}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        load_optimizer_tensors(self.optimizer, trained_names(self.optimizer), tensors["optimizer"])
        if self.ema is not None:
            self.ema.load_state_dict(tensors["ema"])
        if self.master is not None:
            self.master.load(tensors["master"])

    def state(self) -> dict[str, Any]:
        return {
            "spikes": self.guard.state() if self.guard else None,
            "loss_scale": self.scaler.state() if self.scaler else None,
            "halved": self.limits.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.guard is not None and state.get("spikes"):
            self.guard.load(state["spikes"])
        if self.scaler is not None and state.get("loss_scale"):
            self.scaler.load(state["loss_scale"])
        self.limits.load(state.get("halved") or {})


def list_params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
