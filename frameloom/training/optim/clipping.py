"""Limits of the gradient norm that change during a run, and steps that are left out for their norm."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frameloom.core.errors import ConfigError

SPIKE = 5.0
"""times its limit, from which on a norm counts as a spike"""
_MOST_SHRINKING = 10.0


@dataclass(frozen=True)
class FadingLimit:
    """CogVideoX-Fun's rule: a wide limit that narrows over the first steps, and spikes that are cut harder after them.

    The limit falls in a line from `first_ratio * max_norm` at step 0 to `max_norm` at step `num_steps`. After that a
    norm of more than five limits divides the limit by their ratio, at most by ten, so that one bad batch counts little.
    """

    max_norm: float
    first_ratio: float = 5.0
    num_steps: int = 1000

    def __post_init__(self) -> None:
        if not self.max_norm > 0 or not self.first_ratio > 0 or self.num_steps < 0:
            raise ConfigError(
                f"gradient clipping: max_norm {self.max_norm} and first_ratio {self.first_ratio} must be above 0, and "
                f"num_steps {self.num_steps} not below it"
            )

    def at(self, step: int) -> float:
        """The limit at a step, counted from 0, whatever the norm is."""
        if step >= self.num_steps:
            return self.max_norm
        first = self.max_norm * self.first_ratio
        return first + (self.max_norm - first) * step / self.num_steps

    def for_norm(self, step: int, norm: float) -> float:
        """What the gradients of this step are clipped to."""
        limit = self.at(step)
        if step > self.num_steps and norm / limit > SPIKE:
            return limit / min(norm / limit, _MOST_SHRINKING)
        return limit


@dataclass
class SpikeGuard:
    """Finds steps whose gradient norm is more than `ratio` medians of the last `window` norms.

    Norms of spikes count for the median too: a norm that stays high is no spike any more after half a window, so a run
    cannot be stopped for good. Nothing is a spike until a quarter of the window is filled.
    """

    ratio: float = 10.0
    window: int = 100
    num_spikes: int = 0
    _norms: deque[float] = field(default_factory=deque)

    def is_spike(self, norm: float) -> bool:
        """Judge the norm of a step and remember it; one that is not finite is neither judged nor remembered."""
        if not math.isfinite(norm):
            return False
        known = len(self._norms) >= max(self.window // 4, 1)
        found = known and norm > self.ratio * statistics.median(self._norms)
        self._norms.append(norm)
        while len(self._norms) > self.window:
            self._norms.popleft()
        self.num_spikes += found
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the next steps to be judged alike."""
        return {"num_spikes": self.num_spikes, "norms": list(self._norms)}

    def load(self, state: Mapping[str, Any]) -> None:
        norms: Sequence[float] = state["norms"]
        self.num_spikes, self._norms = state["num_spikes"], deque(norms[-self.window :])
