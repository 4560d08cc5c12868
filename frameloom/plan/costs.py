"""What one training step of a denoiser costs in each bucket: measured for some shapes, fitted for the others.

The operations of a transformer or a UNet are a polynomial in latent frames f and cells per frame s: projections go with
f s, attention over space with f s^2, over time with f^2 s, over both with f^2 s^2. A few measured shapes give all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from frameloom.models.denoisers.base import DenoiserFamily
from frameloom.models.text import TextStates
from frameloom.plan.ghosts import GhostMode
from frameloom.plan.tracker import Tally, tally_passes

Shape = tuple[int, int, int]
"""latent frames, height, width"""

# In this order: three terms are all that a model with full attention has.
_BASIS: tuple[Callable[[float, float], float], ...] = (
    lambda f, s: 1.0,
    lambda f, s: f * s,
    lambda f, s: (f * s) ** 2,
    lambda f, s: f * s * s,
    lambda f, s: f * f * s,
    lambda f, s: s,
)
_FIRST_TERMS = 3
_GOOD_FIT = 0.005


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
    """The cost of each shape. `model` is on the meta device, with its recompute applied.

    Shapes are measured until the cost of the next one is what was expected; the rest follow from the fit.
    """
    wanted = _spread(sorted(set(shapes), key=_size))
    runner = _Runner(family, model, latent_channels, text, bf16)
    first = runner.run(wanted[0], 1)
    fixed = _Fixed.find(runner, wanted[0], first)
    found: dict[Shape, StepCost] = {}
    for shape in wanted:
        cost = fixed.split(shape, runner.run(shape, 1) if found else first)
        is_expected = len(found) >= _FIRST_TERMS and _is_near(_estimate(shape, found, fixed), cost)
        found[shape] = cost
        if is_expected:
            break
    return {shape: found.get(shape) or _estimate(shape, found, fixed) for shape in wanted}


def _is_near(expected: StepCost, cost: StepCost) -> bool:
    return all(
        abs(one / other - 1) < _GOOD_FIT
        for one, other in ((expected.flops, cost.flops), (expected.sample_bytes, cost.sample_bytes))
    )


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
        return cls(min(casts, both), max(0, both - casts) / _size(largest), moved)

    def at(self, shape: Shape) -> float:
        return self.casts + self.tables_per_cell * _size(shape)

    def split(self, shape: Shape, tally: Tally) -> StepCost:
        fixed = self.at(shape)
        return StepCost(
            flops=tally.flops,
            moved_bytes=max(0.0, tally.moved - self.moved),
            fixed_moved=self.moved,
            sample_bytes=tally.peak - fixed,
            fixed_bytes=fixed,
            moments=_moments(tally),
            is_measured=True,
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


def _size(shape: Shape) -> int:
    return shape[0] * shape[1] * shape[2]


def _spread(shapes: Sequence[Shape]) -> list[Shape]:
    """All of them; the largest and the smallest first, then always the middle of the widest gap."""
    if len(shapes) < 3:
        return list(reversed(shapes))
    chosen, gaps = [shapes[-1], shapes[0]], [(0, len(shapes) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if middle in (low, high):
            continue
        chosen.append(shapes[middle])
        gaps += [(low, middle), (middle, high)]
    return chosen


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
            _put_weights(self.model)

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


def _put_weights(model: nn.Module) -> None:
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


def _estimate(shape: Shape, measured: Mapping[Shape, StepCost], fixed: _Fixed) -> StepCost:
    known = list(measured)
    num_terms = max(_FIRST_TERMS, min(len(_BASIS), len(known) - 1))

    def fit(values: Sequence[float]) -> float:
        weights = _solve([_terms(other)[:num_terms] for other in known], values)
        return float(np.dot(_terms(shape)[:num_terms], weights))

    return StepCost(
        flops=fit([cost.flops for cost in measured.values()]),
        moved_bytes=fit([cost.moved_bytes for cost in measured.values()]),
        fixed_moved=fixed.moved,
        sample_bytes=fit([cost.sample_bytes for cost in measured.values()]),
        fixed_bytes=fixed.at(shape),
        moments=next(iter(measured.values())).moments,
        is_measured=False,
    )


def _terms(shape: Shape) -> list[float]:
    frames, cells = float(shape[0]), float(shape[1] * shape[2])
    return [term(frames, cells) for term in _BASIS]


def _solve(rows: Sequence[Sequence[float]], values: Sequence[float]) -> NDArray[np.float64]:
    """Least squares on relative errors, columns brought to one scale: terms differ by many orders of magnitude."""
    table, wanted = np.array(rows, dtype=np.float64), np.array(values, dtype=np.float64)
    table = table / wanted[:, None]
    scale = np.abs(table).max(axis=0)
    solution = np.linalg.lstsq(table / scale, np.ones(len(wanted)), rcond=1e-10)[0]
    return np.asarray(solution / scale)
