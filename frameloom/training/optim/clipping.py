"""Limits of the gradient norm: clipping, limits that change during a run, and steps left out for their norm."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from frameloom.config.schema.optim import ClipFadeSection, SpikeSection

SPIKE = 5.0
"""times its limit, from which on a norm counts as a spike"""
_MOST_SHRINKING = 10.0
# Numbers of a gradient whose product with themselves is taken at a time.
_NORM_PIECE = 1 << 18
_CLIP_EPS = 1e-6  # what torch adds to the norm before it divides


@torch.no_grad()
def clip_within_step(
    optimizer: Optimizer, max_norm: float | Callable[[float], float] | None, *, scale: float = 1.0
) -> Tensor:
    """`clip_gradients` of an optimizer's parameters; where its step can scale gradients itself, it will.

    That saves a pass over all gradients. The gradients themselves then stay as they are.
    """
    groups = optimizer.param_groups
    params = [param for group in groups for param in group["params"]]
    # Fused AdamW divides gradients by its `grad_scale`; sharded ones have no kernel that does.
    is_fused = isinstance(optimizer, AdamW) and all(group["fused"] for group in groups)
    if not is_fused or any(isinstance(group["params"][0], DTensor) for group in groups):
        return clip_gradients(params, max_norm, scale=scale)
    norm = measure_gradients(params)
    if scale != 1:
        norm = norm / scale
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    limit = max_norm(float(norm)) if callable(max_norm) else max_norm
    # Where nothing is clipped, and the norm is on the host, dividing by 1 is left out.
    if scale == 1 and (limit is None or (norm.device.type == "cpu" and float(norm) + _CLIP_EPS <= limit)):
        return norm
    excess = torch.ones_like(norm) if limit is None else ((norm + _CLIP_EPS) / limit).clamp_min(1.0)
    optimizer.grad_scale = excess * scale  # type: ignore[attr-defined]
    return norm


@torch.no_grad()
def clip_gradients(
    params: Iterable[nn.Parameter], max_norm: float | Callable[[float], float] | None, *, scale: float = 1.0
) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`; None only measures.

    `max_norm` may be a rule that gives the limit for a norm, which makes the host wait for it. Gradients of a loss that
    was multiplied by `scale` are divided by it first.

    Returns the norm before clipping, on the device: reading it is what makes the host wait, so read it seldom. A norm
    that is not finite makes the gradients not finite.
    """
    with_grad = [param for param in params if param.grad is not None]
    if scale != 1:
        torch._foreach_mul_([param.grad for param in with_grad if param.grad is not None], 1 / scale)
    norm = measure_gradients(with_grad)
    if callable(max_norm):
        max_norm = max_norm(float(norm))
    # On the CPU reading the norm costs nothing, and a pass that multiplies all gradients by 1 can be left out.
    if max_norm is not None and not (norm.device.type == "cpu" and norm + _CLIP_EPS <= max_norm):
        nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    return norm


def measure_gradients(params: Iterable[nn.Parameter]) -> Tensor:
    """The joint 2-norm of all gradients, on their device."""
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return torch.zeros(())
    is_sharded, is_on_host = isinstance(grads[0], DTensor), grads[0].device.type == "cpu"
    if is_on_host and not is_sharded and {grad.dtype for grad in grads} == {torch.float32}:
        # Sums the products of short pieces: of 25 million squares at once MKL on an AMD loses one in three thousand.
        vectors = [grad for grad in grads if grad.ndim == 1]
        flat = [grad.flatten() for grad in grads if grad.ndim != 1] + ([torch.cat(vectors)] if vectors else [])
        pieces = [part for one in flat for part in torch.split(one, _NORM_PIECE)]
        return torch.stack([torch.dot(part, part) for part in pieces]).sum().sqrt()
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    # Each process has the norm of its shard; the sum over all of them is one small collective.
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@dataclass(frozen=True)
class FadingLimit:
    """CogVideoX-Fun's rule: a wide limit that narrows over the first steps, and spikes that are cut harder after them.

    The limit falls in a line from `ratio * max_norm` at step 0 to `max_norm` at step `fade_steps`. After that a norm of
    more than five limits divides the limit by their ratio, at most by ten, so that one bad batch counts little.
    """

    max_norm: float
    section: ClipFadeSection

    def at(self, step: int) -> float:
        """The limit at a step, counted from 0, whatever the norm is."""
        if step >= self.section.fade_steps:
            return self.max_norm
        first = self.max_norm * self.section.ratio
        return first + (self.max_norm - first) * step / self.section.fade_steps

    def for_norm(self, step: int, norm: float) -> float:
        """What the gradients of this step are clipped to."""
        limit = self.at(step)
        if step > self.section.fade_steps and norm / limit > SPIKE:
            return limit / min(norm / limit, _MOST_SHRINKING)
        return limit


@dataclass
class SpikeGuard:
    """Finds steps whose gradient norm is more than `ratio` medians of the last `window` norms.

    Norms of spikes count for the median too: a norm that stays high is no spike any more after half a window, so a run
    cannot be stopped for good. Nothing is a spike until a quarter of the window is filled.
    """

    section: SpikeSection
    num_spikes: int = 0
    _norms: deque[float] = field(default_factory=deque)

    def is_spike(self, norm: float) -> bool:
        """Compare the norm of a step with the median and remember it, unless it is not finite."""
        if not math.isfinite(norm):
            return False
        window = self.section.window
        known = len(self._norms) >= max(window // 4, 1)
        found = known and norm > self.section.ratio * statistics.median(self._norms)
        self._norms.append(norm)
        while len(self._norms) > window:
            self._norms.popleft()
        self.num_spikes += found
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the next steps to be judged alike."""
        return {"num_spikes": self.num_spikes, "norms": list(self._norms)}

    def load(self, state: Mapping[str, Any]) -> None:
        norms: Sequence[float] = state["norms"]
        self.num_spikes, self._norms = state["num_spikes"], deque(norms[-self.section.window :])
