"""One optimizer step: tensors in, numbers out; no files.

The loss of a step is the mean over its samples, whatever the number of micro-batches they come in, so an accumulation
split changes nothing but the order of a sum. A step has a phase for each network that trains in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from frameloom.config.schema.training import LossScaleSection, TrainSection
from frameloom.core.hooks import notify
from frameloom.data.loading.batch import Batch
from frameloom.data.order.rank_assignment import PlannedStep
from frameloom.distributed.fsdp import sync_gradients
from frameloom.models.precision import Precision
from frameloom.training.agreement import Agreement
from frameloom.training.memory.oom_split import (
    BatchLimits,
    FatalOom,
    OomEvent,
    RetrySmaller,
    cut_batch,
    find_oom,
    release_memory,
)
from frameloom.training.memory.optimizer_offload import apply_offload
from frameloom.training.optim.clipping import FadingLimit, SpikeGuard, clip_within_step
from frameloom.training.optim.ema import EMA
from frameloom.training.optim.groups import hidden_matrices
from frameloom.training.optim.optimizer import (
    allocate_state,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    trained_names,
)
from frameloom.training.optim.precision import LossScale, MasterWeights
from frameloom.training.parallel import Parallelism
from frameloom.training.task import Losses, Phase, StepContext, Tensors


@dataclass(frozen=True)
class StepResult:
    """`is_finite` False or `is_spike` means that nothing was changed: weights, averages, optimizer are as before.

    `is_overflow`: not finite only because of the loss scale, which is smaller from now on.
    """

    values: dict[str, float]
    is_finite: bool
    is_spike: bool = False
    is_overflow: bool = False


@dataclass(frozen=True)
class Update:
    """A phase and what moves its weights: optimizer, average, loss scale and limits of the gradient norm.

    `lr_at` gives the learning rate of a step, the first of which is 1. `master` are the copies that `optimizer` and
    `ema` hold in the place of half-precision weights.
    """

    phase: Phase
    model: nn.Module
    optimizer: Optimizer
    lr_at: Callable[[int], float]
    ema: EMA | None
    master: MasterWeights | None
    scaler: LossScale | None
    fade: FadingLimit | None
    guard: SpikeGuard | None

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def backward(self, losses: Losses, piece: Batch, num_samples: int, totals: dict[str, Tensor]) -> None:
        """Leave gradients in the model, and add the loss and its parts to `totals`."""
        losses_B, parts = losses
        # Divided by infinity, a filler takes part in all passes and leaves nothing.
        divisor = math.inf if piece.is_filler else num_samples
        loss = losses_B.sum() / divisor
        torch.autograd.backward(loss if self.scaler is None else loss * self.scaler.scale)
        if self.master is not None:
            self.master.take_gradients()
        found = {"loss": loss.detach(), **{name: part_B.detach().sum() / divisor for name, part_B in parts.items()}}
        for name, part in found.items():
            totals[name] = totals[name] + part if name in totals else part

    def move(self, number: int, totals: Mapping[str, Tensor]) -> StepResult:
        """Clip the gradients and move the weights, unless the numbers forbid it."""
        # The rules count steps from 0.
        limit = self.phase.optim.clip_norm if self.fade is None else partial(self.fade.for_norm, number - 1)
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
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_factor"]
            self.optimizer.step()
            if self.master is not None:
                self.master.write_back()
            if self.ema is not None:
                self.ema.update(number)
        self.optimizer.zero_grad(set_to_none=True)
        if self.guard is not None:
            values["spikes"] = self.guard.num_spikes
        if self.scaler is not None:
            values |= {"loss_scale": scale, "overflows": self.scaler.num_overflows}
        values = {
            f"{self.phase.prefix}{name}": value for name, value in {**values, "grad_norm": grad_norm, "lr": lr}.items()
        }
        return StepResult(values, is_finite, is_spike, is_overflow)

    def tensors(self) -> Tensors:
        found = {"optimizer": optimizer_tensors(self.optimizer, trained_names(self.optimizer))}
        if self.ema is not None:
            found["ema"] = self.ema.state_dict()
        if self.master is not None:
            found["master"] = self.master.tensors()
        return {f"{self.phase.prefix}{group}": tensors for group, tensors in found.items()}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        prefix = self.phase.prefix
        load_optimizer_tensors(self.optimizer, trained_names(self.optimizer), tensors[f"{prefix}optimizer"])
        if self.ema is not None:
            self.ema.load_state_dict(tensors[f"{prefix}ema"])
        if self.master is not None:
            self.master.load(tensors[f"{prefix}master"])
        if self.guard is not None and state.get("spikes"):
            self.guard.load(state["spikes"])
        if self.scaler is not None and state.get("loss_scale"):
            self.scaler.load(state["loss_scale"])

    def state(self) -> dict[str, Any]:
        return {
            "spikes": self.guard.state() if self.guard else None,
            "loss_scale": self.scaler.state() if self.scaler else None,
        }


def build_update(
    phase: Phase,
    model: nn.Module,
    train: TrainSection,
    rate: Callable[[int], float],
    share: float,
    parallel: Parallelism,
) -> Update:
    """The optimizer of a phase and what goes with it; `model` is sharded already. The phase's learning rate is `share`
    times the run's `rate`."""
    optim = phase.optim
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    is_half = any(value.dtype != torch.float32 for value in trained.values())
    master = MasterWeights(trained) if is_half else None
    trained = trained if master is None else master.params
    optimizer = build_optimizer({**trained, **phase.companions}.items(), optim, hidden_matrices(model))
    parallel.shard_optimizer(optimizer)
    if optim.offload:
        apply_offload(optimizer, parallel.device)
    allocate_state(optimizer)  # so that the checkpoint of step 0 is like every other
    # fp16 has a dynamic scale in any case.
    scale = train.loss_scale or (LossScaleSection() if train.precision == "fp16" else None)
    return Update(
        phase,
        model,
        optimizer,
        lr_at=lambda step: share * rate(step),
        ema=EMA(trained, train.ema) if train.ema and phase.ema else None,
        master=master,
        scaler=None if scale is None else LossScale(scale),
        fade=FadingLimit(optim.clip_norm, optim.clip_fade) if optim.clip_fade and optim.clip_norm else None,
        guard=SpikeGuard(optim.skip_spikes) if optim.skip_spikes else None,
    )


@dataclass(frozen=True)
class Stepper:
    """Runs the phases of a step that are due, one after the other.

    `limits` has the buckets whose micro-batches run in pieces, because they do not fit in memory; `statistics` are
    buffers that passes change, which stay as they were where a phase moves no weight.
    """

    updates: Sequence[Update]
    parallel: Parallelism
    agreement: Agreement
    precision: Precision
    limits: BatchLimits
    statistics: Sequence[Tensor] = ()

    @property
    def ema(self) -> EMA | None:
        return self.updates[0].ema

    def step(self, number: int, batches: Sequence[Batch], planned: PlannedStep | None = None) -> StepResult:
        """Steps count from 1; several ranks need the step as `planned`. FatalOom where others wait in a pass that ran
        out of memory; elsewhere a phase begins anew with smaller pieces."""
        self.agreement.begin(number, planned)
        context = StepContext(number - 1)
        results = [
            self._run_phase(update, context, batches) for update in self.updates if update.phase.is_due(context.step)
        ]
        failed = [result for result in results if not result.is_finite]
        return StepResult(
            {name: value for result in results for name, value in result.values.items()},
            is_finite=not failed,
            is_spike=any(result.is_spike for result in results),
            is_overflow=bool(failed) and all(result.is_overflow for result in failed),
        )

    def try_out(self, pieces: Sequence[Batch]) -> OomEvent | None:
        """The passes of these pieces in all phases, of which nothing remains; what ran out of memory, if anything."""
        context = StepContext(max(update.phase.first_step for update in self.updates))
        for update in self.updates:
            before = [buffer.clone() for buffer in self.statistics]
            _, event = self._run_passes(0, update, context, pieces, sum(piece.size for piece in pieces))
            self._forget(update, before)
            if event is not None:
                release_memory(self.parallel.device.type)
                return event
        return None

    def _run_phase(self, update: Update, context: StepContext, batches: Sequence[Batch]) -> StepResult:
        number, num_samples = context.step + 1, self.agreement.count_samples(batches)
        before = [buffer.clone() for buffer in self.statistics]
        while True:
            totals, event = self._run_passes(number, update, context, self._cut(batches), num_samples)
            try:
                sums, missing = self.agreement.join(totals, batches, event)
            except RetrySmaller as found:
                self._forget(update, before)
                release_memory(self.parallel.device.type)
                self.limits.halve(found.events, step=number)
                continue
            if self.parallel.context.size > 1:
                sync_gradients(update.params, self.parallel.context.size, missing)
                self.agreement.monitor.begin()
            result = update.move(number, sums)
            if not result.is_finite or result.is_spike:
                self._forget(update, before)
            return result

    def _cut(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        if not self.limits.most:
            return batches
        counts = self.agreement.count_pieces(batches, self.limits)
        return [piece for batch, count in zip(batches, counts, strict=True) for piece in cut_batch(batch, count)]

    def _run_passes(
        self, number: int, update: Update, context: StepContext, pieces: Sequence[Batch], num_samples: int
    ) -> tuple[dict[str, Tensor], OomEvent | None]:
        """Sums of losses and of their parts, with gradients left in the model; or what ran out of memory."""
        totals: dict[str, Tensor] = {}
        piece, rank, device = pieces[0], self.parallel.context.rank, self.parallel.device
        try:
            for index, piece in enumerate(pieces):
                if self.parallel.shards_weights:
                    self.agreement.monitor.wait()
                    self.parallel.expect_backward(update.model, is_last=index == len(pieces) - 1)
                notify("pass", step=number, rank=rank, bucket=piece.bucket.name, samples=piece.size)
                with self.precision.autocast(device.type):
                    losses = update.phase.losses(context, piece)
                update.backward(losses, piece, num_samples, totals)
        except (RuntimeError, MemoryError) as error:
            event = find_oom(error, piece)
            if event is None:
                raise
            if self.parallel.waits_in_passes:
                raise FatalOom(event) from error
            return {}, event
        return totals, None

    def _forget(self, update: Update, before: Sequence[Tensor]) -> None:
        """Drop gradients, and put back what passes change besides them."""
        update.optimizer.zero_grad(set_to_none=True)
        update.model.zero_grad(set_to_none=True)  # half-precision weights are not the optimizer's own
        for buffer, old in zip(self.statistics, before, strict=True):
            buffer.copy_(old)

    def tensors(self) -> Tensors:
        return {group: tensors for update in self.updates for group, tensors in update.tensors().items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of each phase: of the model's at the top, of others below their network."""
        found: dict[str, Any] = {}
        for update in self.updates:
            own = {**update.state(), "halved": dict(self.limits.most)}
            found |= {update.phase.network: own} if update.phase.prefix else own
        return found

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        for update in self.updates:
            update.load(tensors, state[update.phase.network] if update.phase.prefix else state)
        self.limits.most.clear()
        self.limits.tighten(state.get("halved") or {})
