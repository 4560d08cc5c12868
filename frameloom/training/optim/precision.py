"""Half precision in training: the scale of the loss, and full-precision copies of the weights.

Small gradients vanish in fp16. A loss that is multiplied before the backward pass, and gradients that are divided
after it, move them into its range; too large a factor makes them overflow instead, which shows as gradients that are
not finite. The dynamic rule is that of MindSpore and of PyTorch's scaler: up by a factor after a window of clean steps,
down by the same factor on every overflow.

A small step vanishes in bf16: an update of less than 2^-9 of a weight rounds away. The copies keep it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.config.schema.training import LossScaleSection
from frameloom.core.errors import CheckpointError


class LossScale:
    """What losses are multiplied by; a dynamic one stays between the section's `minimum` and `MAXIMUM`."""

    MAXIMUM = 2.0**24  # beyond it a loss of a few thousands would overflow the sum of squares of its gradients

    def __init__(self, section: LossScaleSection) -> None:
        self.section = section
        self.scale = float(section.initial)
        self.clean_steps = self.num_overflows = 0

    @property
    def is_dynamic(self) -> bool:
        return self.section.mode == "dynamic"

    def adapt(self, *, is_finite: bool, loss: float) -> bool:
        """Move after a step; whether it failed for its scale alone, which is smaller now.

        A loss that is not finite itself is none of the scale's doing, and at its minimum there is nothing left to try.
        """
        if is_finite:
            self.clean_steps += self.is_dynamic
            if self.is_dynamic and self.clean_steps >= self.section.window:
                self.scale = min(self.scale * self.section.factor, max(self.MAXIMUM, self.scale))
                self.clean_steps = 0
            return False
        if not math.isfinite(loss):
            return False
        can_shrink = self.is_dynamic and self.scale > self.section.minimum
        self.num_overflows += 1
        self.clean_steps = 0
        if self.is_dynamic:
            self.scale = max(self.scale / self.section.factor, min(self.section.minimum, self.scale))
        return can_shrink

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the next steps to be scaled alike."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "num_overflows": self.num_overflows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; a static scale stays as the recipe has it."""
        self.num_overflows = int(state["num_overflows"])
        if self.is_dynamic:
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
