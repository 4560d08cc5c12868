"""Cost of one training step of a denoiser in each bucket: measured for some shapes, fitted for the others.

Shape letters: B batch, C channels, F frames, H height, W width, K text tokens, D width, M moments of a pass, S shares
of the gradients.

With f frames of s cells, projections and convolutions go with f s, attention over space with f s^2, over time with
f^2 s, over both with f^2 s^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from frameloom.models.denoisers.base import Denoiser
from frameloom.models.layers.dropout import has_dropout
from frameloom.models.spec import DenoiserSpec
from frameloom.models.text.base import TextStates
from frameloom.planner.forked_task import forked_task
from frameloom.planner.shape_tensors import ShapeMode, Tally, put_weights, tally_passes

Shape = tuple[int, int, int]
"""frames, height, width"""

Values = tuple[float, ...]
"""costs of one shape that are fitted, such as operations and bytes"""


class TextShape(NamedTuple):
    tokens: int
    width: int
    pooled_width: int


@dataclass(frozen=True)
class MetaDenoiser:
    """A denoiser on the meta device, and what its inputs follow from."""

    family: DenoiserSpec
    model: Denoiser
    config: Any
    text: TextShape
    latent_channels: int


class Moment(NamedTuple):
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

    @property
    def fitted(self) -> Values:
        """Operations, what a sample adds to a large batch, bytes moved: what other shapes follow from."""
        return self.flops, max(moment.sample for moment in self.moments), self.moved_bytes

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


def measure_costs(
    denoiser: MetaDenoiser, shapes: Iterable[Shape], *, bf16: bool, with_alone: bool = True
) -> dict[Shape, StepCost]:
    """The cost of each shape, in latent cells. The model is changed; its recompute is applied before.

    Shapes are measured until the next one is what was expected of it; the others follow from the fit.

    `with_alone`: whether a pass is spent on what one sample saves; nothing where all blocks are recomputed.
    """
    mode = ShapeMode()
    with mode:
        put_weights(denoiser.model)
    tally_pass = partial(_tally_pass, denoiser, mode, bf16)
    wanted = _order_shapes(shapes)
    # So many are always measured: three for the terms, and one that shows whether they are enough.
    passes = [(shape, _BATCH) for shape in wanted[: _FIRST_TERMS + 1]]
    passes = [(wanted[0], 1), *passes] if with_alone else passes
    with forked_task(lambda: [tally_pass(*one) for one in passes[1::2]]) as wait_for_others:
        tallies = {one: tally_pass(*one) for one in passes[::2]}
        tallies |= dict(zip(passes[1::2], wait_for_others(), strict=True))

    measured: dict[Shape, StepCost] = {}
    for shape in wanted:
        cost = _to_cost(tallies.get((shape, _BATCH)) or tally_pass(shape, _BATCH))
        is_expected = len(measured) >= _FIRST_TERMS and np.allclose(
            _estimate(shape, measured)[:2], cost.fitted[:2], rtol=_GOOD_FIT, atol=0
        )
        measured[shape] = cost
        if is_expected:
            break
    if with_alone:
        worst = max(measured[wanted[0]].moments, key=lambda moment: moment.fixed + moment.sample)
        # What makes the activations of one sample as many as its peak; beside large casts that is within their error.
        alone = min(1.0, max(0.0, (tallies[wanted[0], 1].peak - worst.fixed) / worst.sample))
        measured = {shape: replace(cost, alone=alone) for shape, cost in measured.items()}
    return {shape: measured.get(shape) or _fit(shape, measured) for shape in wanted}


def _tally_pass(denoiser: MetaDenoiser, mode: ShapeMode, bf16: bool, shape: Shape, batch: int) -> Tally:
    """Forward, loss and backward of a batch, in which nothing is computed."""
    model, text = denoiser.model, denoiser.text
    with mode:
        states = TextStates(
            tokens_BKD=torch.empty(batch, text.tokens, text.width),
            mask_BK=torch.empty(batch, text.tokens, dtype=torch.bool),
            pooled_BD=torch.empty(batch, text.pooled_width),
        )
        # Masks of dropout are kept for the backward pass.
        seeds = {"dropout_seeds": torch.from_numpy(np.zeros(batch, dtype=np.int64))} if has_dropout(model) else {}
        noisy_BCFHW = torch.empty(batch, denoiser.latent_channels, *shape)
        target_BCFHW, timestep_B = torch.empty_like(noisy_BCFHW), torch.empty(batch)
        with tally_passes(model, mode, batch=batch) as tally:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                made_BCFHW = model(noisy_BCFHW, timestep_B, {**states.conditions(), **seeds})
            loss = F.mse_loss(made_BCFHW.float(), target_BCFHW)
            del made_BCFHW
            torch.autograd.backward(loss)
        return tally


def _to_cost(tally: Tally) -> StepCost:
    """With the moments that are the worst for some batch and some amount of gradients.

    The end, when all gradients are there, is one of the candidates.
    """
    pairs = [(*pair, gradients) for gradients, front in tally.fronts.items() for pair in front]
    fixed, samples, gradients = np.array([*pairs, (0, 0, tally.gradients)], dtype=np.float64).T
    sample, share = samples / _BATCH, gradients / max(tally.gradients, 1)
    samples_MB, gradients_MS = np.outer(sample, _BATCHES), np.outer(gradients, _SHARES)
    bytes_MBS = fixed[:, None, None] + samples_MB[:, :, None] + gradients_MS[:, None, :]
    worst = np.unique(bytes_MBS.reshape(len(fixed), -1).argmax(0))
    return StepCost(
        flops=tally.flops / _BATCH,
        moved_bytes=tally.samples_moved / _BATCH,
        fixed_moved=tally.fixed_moved,
        moments=tuple(Moment(float(fixed[index]), float(sample[index]), float(share[index])) for index in worst),
        is_measured=True,
    )


def _fit(shape: Shape, measured: Mapping[Shape, StepCost]) -> StepCost:
    """Like the shape that is nearest in tokens, with samples as large as was fitted."""
    near = measured[min(measured, key=lambda other: abs(math.log(count_cells(other) / count_cells(shape))))]
    flops, sample, moved = _estimate(shape, measured)
    ratio = sample / near.fitted[1]
    moments = tuple(moment._replace(sample=ratio * moment.sample) for moment in near.moments)
    return replace(near, flops=flops, moved_bytes=moved, moments=moments, is_measured=False)


def count_cells(shape: Shape) -> int:
    return shape[0] * shape[1] * shape[2]


def _order_shapes(shapes: Iterable[Shape]) -> list[Shape]:
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


def _estimate(shape: Shape, known: Mapping[Shape, StepCost]) -> Values:
    """Least squares on relative errors, columns brought to one scale: terms differ by many orders of magnitude."""
    num_terms = max(_FIRST_TERMS, min(len(_BASIS), len(known) - 1))
    basis = _BASIS[:num_terms]
    *rows, terms = np.array([[float(term(f, h * w)) for term in basis] for f, h, w in (*known, shape)])
    estimates = []
    for wanted in zip(*(cost.fitted for cost in known.values()), strict=True):
        table = np.array(rows) / np.array(wanted)[:, None]
        scale = np.abs(table).max(axis=0)
        solution = np.linalg.lstsq(table / scale, np.ones(len(wanted)), rcond=1e-10)[0]
        estimates.append(float(np.dot(terms, solution / scale)))
    return tuple(estimates)
