"""What one training step of a denoiser costs in each bucket: measured for some shapes, fitted for the others.

Shape letters: M moments of a pass, B batches, S shares of gradients.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frameloom.models.denoisers.base import DenoiserFamily
from frameloom.models.text import TextStates
from frameloom.plan.fitting import Fitted, Shape, count_cells, measure_some
from frameloom.plan.ghosts import GhostMode
from frameloom.plan.tracker import Tally, tally_passes


@dataclass(frozen=True)
class TextShape:
    tokens: int
    width: int
    pooled_width: int


@dataclass(frozen=True)
class Moment:
    """A time in a pass when most may live: bytes for any batch (casts of weights), bytes of each sample, and the share
    of all gradients of weights that are there; the gradients themselves are not in the bytes."""

    fixed: float
    sample: float
    gradients: float


@dataclass(frozen=True)
class StepCost:
    """Of one sample: operations and bytes moved forward and backward; `fixed_moved` comes once for any batch.

    Which of the `moments` is the worst depends on the batch: casts of weights weigh most beside few samples, and are
    gone where many samples weigh most.
    """

    flops: float
    moved_bytes: float
    fixed_moved: float
    moments: tuple[Moment, ...]
    is_measured: bool

    def activation_bytes(self, batch: float) -> float:
        return max(moment.fixed + batch * moment.sample for moment in self.moments)

    def transient_bytes(self, batch: float, gradients: float, *, keeps_gradients: bool = False) -> float:
        """What a pass needs beside the weights, all `gradients` of them included.

        Activations go as gradients come. With `keeps_gradients`, when a step has several passes, both are there.
        """
        if keeps_gradients:
            return self.activation_bytes(batch) + gradients
        return max(each.fixed + batch * each.sample + each.gradients * gradients for each in self.moments)


# Passes of one sample and of so many tell what goes with the batch. One sample takes shorter ways at some places.
_MANY = 8
# Batches, and gradients as shares of those of one process, for which the worst moments are looked up.
_BATCHES = 2.0 ** np.arange(-4, 13)
_SHARES = np.array([0.0, *2.0 ** np.arange(-10, 1)])


def measure_costs(
    family: DenoiserFamily,
    model: nn.Module,
    shapes: Iterable[Shape],
    *,
    latent_channels: int,
    text: TextShape,
    bf16: bool,
) -> dict[Shape, StepCost]:
    """The cost of each shape, in latent cells. `model` is on the meta device, with its recompute applied."""
    runner = _Runner(family, model, latent_channels, text, bf16)
    costs: dict[Shape, StepCost] = {}

    def measure(shape: Shape) -> tuple[float, float, float]:
        cost = costs[shape] = _measure(runner, shape)
        return cost.flops, _steepest(cost), cost.moved_bytes

    found = measure_some(shapes, measure)
    return {shape: costs[shape] if one.is_measured else _fit(shape, one, costs) for shape, one in found.items()}


def _measure(runner: _Runner, shape: Shape) -> StepCost:
    one, many = (runner.run(shape, batch) for batch in (1, _MANY))
    moved = max(0.0, (many.moved - one.moved) / (_MANY - 1))
    return StepCost(
        flops=one.flops,
        moved_bytes=moved,
        fixed_moved=max(0.0, one.moved - moved),
        moments=_find_moments(one, many),
        is_measured=True,
    )


def _find_moments(one: Tally, many: Tally) -> tuple[Moment, ...]:
    """Those that are the worst for some batch and some amount of gradients.

    The end, when all gradients are there, is one of them.
    """
    levels = sorted(many.most)
    with_many = [many.most[levels[max(0, bisect_right(levels, level) - 1)]] for level in one.most]
    with_one = np.array([*one.most.values(), 0], dtype=np.float64)
    sample = (np.array([*with_many, 0]) - with_one) / (_MANY - 1)
    fixed, share = with_one - sample, np.array([*one.most, one.gradients]) / max(one.gradients, 1)
    gradients = share * one.gradients
    samples_MB, gradients_MS = np.outer(sample, _BATCHES), np.outer(gradients, _SHARES)
    bytes_MBS = fixed[:, None, None] + samples_MB[:, :, None] + gradients_MS[:, None, :]
    worst = np.unique(bytes_MBS.reshape(len(fixed), -1).argmax(0))
    return tuple(Moment(float(fixed[index]), float(sample[index]), float(share[index])) for index in worst)


def _steepest(cost: StepCost) -> float:
    """What a sample adds to a large batch."""
    return max(moment.sample for moment in cost.moments)


def _fit(shape: Shape, found: Fitted, costs: Mapping[Shape, StepCost]) -> StepCost:
    """Like the shape that is nearest in tokens, with samples as large as was fitted."""
    near = min(costs, key=lambda other: abs(math.log(count_cells(other) / count_cells(shape))))
    flops, sample, moved = found.values
    ratio = sample / _steepest(costs[near])
    moments = tuple(replace(moment, sample=ratio * moment.sample) for moment in costs[near].moments)
    return StepCost(flops, moved, costs[near].fixed_moved, moments, is_measured=False)


@dataclass
class _Runner:
    family: DenoiserFamily
    model: nn.Module
    latent_channels: int
    text: TextShape
    bf16: bool
    mode: GhostMode = field(default_factory=GhostMode)

    def __post_init__(self) -> None:
        with self.mode:
            put_weights(self.model)

    def run(self, shape: Shape, batch: int) -> Tally:
        """Forward, loss and backward of a batch, in which nothing is computed."""
        with self.mode:
            text = TextStates(
                tokens_BKD=torch.empty(batch, self.text.tokens, self.text.width),
                mask_BK=torch.empty(batch, self.text.tokens, dtype=torch.bool),
                pooled_BD=torch.empty(batch, self.text.pooled_width),
            )
            noisy_BCFHW = torch.empty(batch, self.latent_channels, *shape)
            target_BCFHW, timestep_B = torch.empty_like(noisy_BCFHW), torch.empty(batch)
            with tally_passes(self.model, self.mode) as tally:
                casting = torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext()
                with casting:
                    made_BCFHW = self.family.denoise(self.model, noisy_BCFHW, timestep_B, text)
                loss = F.mse_loss(made_BCFHW.float(), target_BCFHW)
                del made_BCFHW
                torch.autograd.backward(loss)
            return tally


def put_weights(model: nn.Module) -> None:
    """Stand-ins on the host for weights on the meta device: automatic casts do not know that device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_like(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _like(buffer)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
