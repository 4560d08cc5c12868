"""What one training step of a denoiser costs in each bucket: measured for some shapes, fitted for the others."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frameloom.models.denoisers.base import DenoiserFamily
from frameloom.models.text import TextStates
from frameloom.plan.fitting import Fitted, Shape, count_cells, measure_some, order_shapes
from frameloom.plan.ghosts import GhostMode
from frameloom.plan.tracker import Tally, tally_passes


@dataclass(frozen=True)
class TextShape:
    tokens: int
    width: int
    pooled_width: int


@dataclass(frozen=True)
class StepCost:
    """Of one sample: operations and bytes moved forward and backward, and bytes that live at the worst moment.

    `fixed_moved` and `fixed_bytes` come once for any batch (casts of weights). Gradients of weights are not in these:
    `moments` has pairs of shares, (of these bytes, of all gradients), that live at the same time.
    """

    flops: float
    moved_bytes: float
    fixed_moved: float
    sample_bytes: float
    fixed_bytes: float
    moments: tuple[tuple[float, float], ...]
    is_measured: bool

    def activation_bytes(self, batch: float) -> float:
        return self.fixed_bytes + batch * self.sample_bytes

    def transient_bytes(self, batch: float, gradients: float, *, keeps_gradients: bool = False) -> float:
        """What a pass needs beside the weights, all `gradients` of them included.

        Activations go as gradients come. With `keeps_gradients`, when a step has several passes, both are there.
        """
        if keeps_gradients:
            return self.activation_bytes(batch) + gradients
        return max(part * self.activation_bytes(batch) + share * gradients for part, share in self.moments)


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
    wanted = order_shapes(shapes)
    largest = wanted[0]
    runner = _Runner(family, model, latent_channels, text, bf16)
    tallies = {largest: runner.run(largest, 1)}
    fixed = _Fixed.find(runner, largest, tallies[largest])

    def measure(shape: Shape) -> tuple[float, float, float]:
        tally = tallies[shape] = tallies.get(shape) or runner.run(shape, 1)
        return tally.flops, tally.peak - fixed.at(shape), max(0.0, tally.moved - fixed.moved)

    found = measure_some(wanted, measure)
    moments = {shape: _moments(tally) for shape, tally in tallies.items()}
    return {shape: fixed.join(shape, one, moments.get(shape, moments[largest])) for shape, one in found.items()}


@dataclass(frozen=True)
class _Fixed:
    """What lives once for any batch: casts of the weights, and tables that go with the tokens of a sample."""

    casts: float
    tables_per_cell: float
    moved: float

    @classmethod
    def find(cls, runner: _Runner, largest: Shape, once: Tally) -> _Fixed:
        """From what a batch of one, `once`, and a batch of two need."""
        twice = runner.run(largest, 2)
        both = max(0, 2 * once.peak - twice.peak)
        moved = max(0, 2 * once.moved - twice.moved)
        casts = sum(2 * weight.numel() for weight in runner.model.parameters()) if runner.bf16 else 0
        return cls(min(casts, both), max(0, both - casts) / count_cells(largest), moved)

    def at(self, shape: Shape) -> float:
        return self.casts + self.tables_per_cell * count_cells(shape)

    def join(self, shape: Shape, found: Fitted, moments: tuple[tuple[float, float], ...]) -> StepCost:
        """With what a sample adds: operations, bytes that live, bytes moved."""
        flops, sample_bytes, moved_bytes = found.values
        return StepCost(
            flops=flops,
            moved_bytes=moved_bytes,
            fixed_moved=self.moved,
            sample_bytes=sample_bytes,
            fixed_bytes=self.at(shape),
            moments=moments,
            is_measured=found.is_measured,
        )


def _moments(tally: Tally) -> tuple[tuple[float, float], ...]:
    """Only those that can be the worst for some amounts of both: the corners of their hull.

    The end, when all gradients are there, is one of them.
    """
    corners: list[tuple[float, float]] = []
    for gradients, others in [(tally.gradients, 0), *sorted(tally.most.items(), reverse=True)]:
        moment = (others / tally.peak, gradients / max(tally.gradients, 1))
        if corners and moment[0] <= corners[-1][0]:
            continue
        while len(corners) > 1 and not _bends(corners[-2], corners[-1], moment):
            corners.pop()
        corners.append(moment)
    return tuple(corners)


def _bends(start: tuple[float, float], middle: tuple[float, float], end: tuple[float, float]) -> bool:
    """Whether the middle one is outside of the line from the first to the last."""
    way, height = (end[0] - start[0], end[1] - start[1]), (middle[0] - start[0], middle[1] - start[1])
    return way[0] * height[1] > way[1] * height[0]


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
