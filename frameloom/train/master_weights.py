"""Full-precision copies of half-precision weights: the optimizer moves the copies, the model gets them rounded.

A small step vanishes in bf16: an update of less than 2^-9 of a weight rounds away. The copies keep it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError


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
