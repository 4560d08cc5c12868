"""The factor of a loss that keeps gradients inside the range of half precision.

Small gradients vanish in fp16. A loss that is multiplied before the backward pass, and gradients that are divided
after it, move them into its range; too large a factor makes them overflow instead, which shows as gradients that are
not finite. The dynamic rule is that of MindSpore and of PyTorch's scaler: up by a factor after a window of clean steps,
down by the same factor on every overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class LossScale:
    """`factor` None is a static scale, which nothing changes. A dynamic one stays between `minimum` and `MAXIMUM`."""

    scale: float = 65536.0
    factor: float | None = 2.0
    window: int = 2000
    minimum: float = 1.0
    clean_steps: int = 0
    num_overflows: int = 0

    MAXIMUM = 2.0**24  # beyond it a loss of a few thousands would overflow the sum of squares of its gradients

    @property
    def can_shrink(self) -> bool:
        return self.factor is not None and self.scale > self.minimum

    def note_clean(self) -> None:
        """A step whose gradients were finite."""
        if self.factor is None:
            return
        self.clean_steps += 1
        if self.clean_steps >= self.window:
            self.scale = min(self.scale * self.factor, max(self.MAXIMUM, self.scale))
            self.clean_steps = 0

    def note_overflow(self) -> None:
        """A step whose gradients were not finite, although its loss was."""
        self.num_overflows += 1
        self.clean_steps = 0
        if self.factor is not None:
            self.scale = max(self.scale / self.factor, min(self.minimum, self.scale))

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the next steps to be scaled alike."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "num_overflows": self.num_overflows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; a static scale stays as the recipe has it."""
        self.num_overflows = int(state["num_overflows"])
        if self.factor is not None:
            self.scale, self.clean_steps = float(state["scale"]), int(state["clean_steps"])
