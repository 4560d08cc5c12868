"""Cost of one training step of a denoiser in each bucket: measured for some shapes, fitted for the others.

Shape letters: B batch, C channels, F frames, H height, W width, K text tokens, D width, M moments of a pass, S shares
of the gradients.

With f frames of s cells, projections and convolutions go with f s, attention over space with f s^2, over time with
f^2 s, over both with f^2 s^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from frameloom.models.denoisers.conditions import Conditions
from frameloom.models.layers.dropout import DropoutSeeds, has_dropout
from frameloom.models.spec import DenoiserSpec
from frameloom.models.text.base import TextStates
from frameloom.planner.forked_task import ForkedTask, can_fork
from frameloom.planner.shape_tensors import GhostMode, put_weights
from frameloom.planner.tracker import Tally, tally_passes

Shape = tuple[int, int, int]
"""frames, height, width"""

Values = tuple[float, ...]
"""costs of one shape that are fitted, such as operations and bytes"""


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
    gone where many samples weigh most. A sample that is alone takes `alone` of their bytes: a part of its tokens is
    one piece of memory and needs no copy.
    """

    flops: float
    moved_bytes: float
    fixed_moved: float
    moments: tuple[Moment, ...]
    is_measured: bool
    alone: float = 1.0

    def activation_bytes(self, batch: float) -> float:
        return self.transient_bytes(batch, 0.0)

    def transient_bytes(self, batch: float, gradients: float, *, keeps_gradients: bool = False) -> float:
        """What a pass needs beside the weights, all `gradients` of them included.

        Activations go as gradients come. With `keeps_gradients`, when a step has several passes, both are there.
        """
        if keeps_gradients:
            return self.activation_bytes(batch) + gradients
        samples = batch if batch > 1 else batch * self.alone
        return max(each.fixed + samples * each.sample + each.gradients * gradients for each in self.moments)


# Samples of a measured pass. A prime that divides no size of a model tells what goes with the batch from what does not.
_BATCH = 1009
# Batches, and gradients as shares of those of one process, for which the worst moments are looked up.
_BATCHES = 2.0 ** np.arange(-4, 13)
_SHARES = np.array([0.0, *2.0 ** np.arange(-10, 1)])


def measure_costs(
    family: DenoiserSpec,
    model: nn.Module,
    shapes: Iterable[Shape],
    *,
    latent_channels: int,
    text: TextShape,
    bf16: bool,
    with_alone: bool = True,
) -> dict[Shape, StepCost]:
    """The cost of each shape, in latent cells. `model` is on the meta device, with its recompute applied.

    `with_alone`: whether a pass is spent on what one sample saves; nothing where all blocks are recomputed.
    """
    runner = _Runner(family, model, latent_channels, text, bf16)
    wanted = order_shapes(shapes)
    largest, first = wanted[0], wanted[:FIRST_SHAPES]
    ones = [(largest, 1)] if with_alone else []
    tallies = runner.run_all([*ones, *((shape, _BATCH) for shape in first)])
    costs: dict[Shape, StepCost] = {}

    def measure(shape: Shape) -> tuple[float, float, float]:
        cost = costs[shape] = _to_cost(tallies.get((shape, _BATCH)) or runner.run(shape, _BATCH))
        return cost.flops, _steepest(cost), cost.moved_bytes

    found = measure_some(wanted, measure)
    alone = _find_alone(costs[largest], tallies[largest, 1].peak) if with_alone else 1.0
    costs = {shape: replace(cost, alone=alone) for shape, cost in costs.items()}
    return {shape: costs[shape] if one.is_measured else _fit(shape, one, costs) for shape, one in found.items()}


def _find_alone(cost: StepCost, peak: float) -> float:
    """What makes the activations of one sample as many as its `peak`; beside large casts that is within their error."""
    worst = max(cost.moments, key=lambda moment: moment.fixed + moment.sample)
    return min(1.0, max(0.0, (peak - worst.fixed) / worst.sample))


def _to_cost(tally: Tally) -> StepCost:
    return StepCost(
        flops=tally.flops / _BATCH,
        moved_bytes=tally.samples_moved / _BATCH,
        fixed_moved=tally.fixed_moved,
        moments=_find_moments(tally),
        is_measured=True,
    )


def _find_moments(tally: Tally) -> tuple[Moment, ...]:
    """Those that are the worst for some batch and some amount of gradients.

    The end, when all gradients are there, is one of them.
    """
    pairs = [(*pair, gradients) for gradients, front in tally.fronts.items() for pair in front]
    fixed, samples, gradients = np.array([*pairs, (0, 0, tally.gradients)], dtype=np.float64).T
    sample, share = samples / _BATCH, gradients / max(tally.gradients, 1)
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
    return replace(costs[near], flops=flops, moved_bytes=moved, moments=moments, is_measured=False)


@dataclass
class _Runner:
    family: DenoiserSpec
    model: nn.Module
    latent_channels: int
    text: TextShape
    bf16: bool
    mode: GhostMode = field(default_factory=GhostMode)

    def __post_init__(self) -> None:
        with self.mode:
            put_weights(self.model)

    def run_all(self, passes: Sequence[tuple[Shape, int]]) -> dict[tuple[Shape, int], Tally]:
        """Shapes with their batches; every other pass in a process of its own."""
        with ForkedTask(lambda: [self.run(*one) for one in passes[1::2]], is_apart=can_fork()) as others:
            mine = [self.run(*one) for one in passes[::2]]
            return dict(zip([*passes[::2], *passes[1::2]], [*mine, *others.result()], strict=True))

    def run(self, shape: Shape, batch: int) -> Tally:
        """Forward, loss and backward of a batch, in which nothing is computed."""
        with self.mode:
            text = TextStates(
                tokens_BKD=torch.empty(batch, self.text.tokens, self.text.width),
                mask_BK=torch.empty(batch, self.text.tokens, dtype=torch.bool),
                pooled_BD=torch.empty(batch, self.text.pooled_width),
            )
            # Masks of dropout are kept for the backward pass.
            seeds = DropoutSeeds(np.zeros(batch, dtype=np.uint64)) if has_dropout(self.model) else None
            given = Conditions(dropout=seeds)
            noisy_BCFHW = torch.empty(batch, self.latent_channels, *shape)
            target_BCFHW, timestep_B = torch.empty_like(noisy_BCFHW), torch.empty(batch)
            with tally_passes(self.model, self.mode, batch=batch) as tally:
                casting = torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext()
                with casting:
                    made_BCFHW = self.family.denoise(self.model, noisy_BCFHW, timestep_B, text, given)
                loss = F.mse_loss(made_BCFHW.float(), target_BCFHW)
                del made_BCFHW
                torch.autograd.backward(loss)
            return tally


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

# So many are always measured: three for the terms, and one that shows whether they are enough.
FIRST_SHAPES = _FIRST_TERMS + 1


@dataclass(frozen=True)
class Fitted:
    values: Values
    is_measured: bool


def measure_some(shapes: Iterable[Shape], measure: Callable[[Shape], Values]) -> dict[Shape, Fitted]:
    """The values of each shape, measured until the first two of the next one are what was expected.

    The rest follow from the fit.
    """
    wanted = order_shapes(shapes)
    known: dict[Shape, Values] = {}
    for shape in wanted:
        found = measure(shape)
        is_expected = len(known) >= _FIRST_TERMS and _are_near(_estimate(shape, known)[:2], found[:2])
        known[shape] = found
        if is_expected:
            break
    return {
        shape: Fitted(known[shape], True) if shape in known else Fitted(_estimate(shape, known), False)
        for shape in wanted
    }


def count_cells(shape: Shape) -> int:
    return shape[0] * shape[1] * shape[2]


def _are_near(expected: Values, found: Values) -> bool:
    return all(abs(one - other) <= _GOOD_FIT * abs(other) for one, other in zip(expected, found, strict=True))


def order_shapes(shapes: Iterable[Shape]) -> list[Shape]:
    """Each once; the largest and the smallest first, then always the middle of the widest gap."""
    rising = sorted(set(shapes), key=lambda shape: (count_cells(shape), shape))
    if len(rising) < 3:
        return rising[::-1]
    chosen, gaps = [rising[-1], rising[0]], [(0, len(rising) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if middle in (low, high):
            continue
        chosen.append(rising[middle])
        gaps += [(low, middle), (middle, high)]
    return chosen


def _estimate(shape: Shape, known: Mapping[Shape, Values]) -> Values:
    num_terms = max(_FIRST_TERMS, min(len(_BASIS), len(known) - 1))
    rows = [_terms(other)[:num_terms] for other in known]
    terms = _terms(shape)[:num_terms]
    return tuple(float(np.dot(terms, _solve(rows, values))) for values in zip(*known.values(), strict=True))


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
