"""Precision policy of a network: dtypes of its passes and of its weights, with norm layers as the exception."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""by the names that recipes use"""


@dataclass(frozen=True)
class Precision:
    """Dtypes of one network by name; see `DTYPES`.

    compute     of forward and backward passes
    weights     of the parameters
    gather      in which sharded parameters are gathered (FSDP)
    fp32_norms  norm layers have float32 parameters and compute in float32

    A network that trains runs under `autocast` after `cast_trained`. A frozen one, after `cast_frozen`, takes inputs of
    its own dtype and needs no autocast.
    """

    compute: str = "fp32"
    weights: str = "fp32"
    gather: str = "fp32"
    fp32_norms: bool = True

    @classmethod
    def frozen(cls, name: str, *, fp32_norms: bool = False) -> Precision:
        """Of a network whose weights and passes have one dtype."""
        return cls(name, name, fp32_norms=fp32_norms)

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES[self.compute]

    @property
    def weights_dtype(self) -> torch.dtype:
        return DTYPES[self.weights]

    @property
    def gather_dtype(self) -> torch.dtype:
        return DTYPES[self.gather]

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        """Passes in the dtype `compute`; nothing changes with fp32."""
        return nullcontext() if self.compute == "fp32" else torch.autocast(device_type, self.compute_dtype)

    def cast_trained(self, model: nn.Module, *, keep: Collection[nn.Parameter] = ()) -> None:
        """Round the parameters in place, but for those of `keep`, for passes under autocast, which computes norms in
        float32. Buffers, such as tables of positions, stay as they are."""
        kept = {id(param) for param in keep}
        if self.fp32_norms:
            kept |= {id(param) for norm in find_norms(model) for param in norm.parameters(recurse=False)}
        for param in model.parameters():
            if id(param) not in kept and param.is_floating_point():
                param.data = param.data.to(self.weights_dtype)

    def cast_frozen(self, model: nn.Module) -> None:
        """Round all parameters in place, for passes without autocast, in which every layer gives the dtype `weights`:
        norms that compute in float32 convert what they take and give. Buffers stay as they are."""
        for param in model.parameters():
            if param.is_floating_point():
                param.data = param.data.to(self.weights_dtype)
        if self.fp32_norms and self.weights != "fp32":
            for norm in find_norms(model):
                norm.float().register_forward_pre_hook(lambda module, given: (given[0].float(), *given[1:]))
                norm.register_forward_hook(lambda module, given, result: result.to(self.weights_dtype))


FP32 = Precision()


def find_norms(model: nn.Module) -> Iterator[nn.Module]:
    """Norm layers, by the name of their class, that have weights of their own."""
    for module in model.modules():
        if "Norm" in type(module).__name__ and any(True for _ in module.parameters(recurse=False)):
            yield module
