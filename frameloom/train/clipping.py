"""Limits of the gradient norm that change during a run."""

from __future__ import annotations

from dataclasses import dataclass

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
