"""Half precision in training: the scale of the loss, and full-precision copies of the weights.

Small gradients vanish in fp16. A loss that is multiplied before the backward pass, and gradients that are divided
after it, move them into its range; too large a factor makes them overflow instead, which shows as gradients that are
not finite. The dynamic rule is that of MindSpore and of PyTorch's scaler: up by a factor after a window of clean steps,
down by the same factor on every overflow.

A small step vanishes in bf16: an update of less than 2^-9 of a weight rounds away. The copies keep it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError


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


class MasterWeights:
    """Float32 copies of the parameters given; those that are float32 already need none and stand for themselves.

    `params` is what an optimizer and an average are built on. Build it after sharding, so that each process copies its
    own shard.
    """

    def __init__(self, model_params: Mapping[str, nn.Parameter]) -> None:
        self._half = {name: param for name, param in model_params.items() if param.dtype != torch.float32}
        self._copies = {name: nn.Parameter(param.detach().to(torch.float32)) for name, param in self._half.items()}
        self.params = {name: self._copies.get(name, param) for name, param in model_params.items()}

    def take_gradients(self) -> None:
        """Add the gradients of the model to those of the copies, in float32; the model keeps none.

        To be called after every micro-batch: a sum in half precision would lose the small ones.
        """
        for name, param in self._half.items():
            copy, grad = self._copies[name], param.grad
            if grad is not None:
                copy.grad = grad.to(torch.float32) if copy.grad is None else copy.grad.add_(grad)
            param.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the copies into the model."""
        if self._half:
            torch._foreach_copy_(list(self._half.values()), list(self._copies.values()))

    def tensors(self) -> dict[str, Tensor]:
        """The copies by name; the tensors themselves."""
        return {name: copy.detach() for name, copy in self._copies.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up the copies of a checkpoint, and round them into the model."""
        if odd := sorted(set(tensors) ^ set(self._copies)):
            raise CheckpointError(
                f"master weights: {len(odd)} are in the checkpoint only or in the model only, first: {odd[0]}; "
                "resume with the recipe of the checkpoint"
            )
        for name, copy in self._copies.items():
            copy.copy_(tensors[name])
        self.write_back()
