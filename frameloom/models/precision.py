"""Casting of weights to half precision, with norm layers kept in float32."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.weights.dtypes import DTYPES, torch_dtype

PRECISIONS = {name: torch_dtype(name) for name in DTYPES}


def find_norms(model: nn.Module) -> Iterator[nn.Module]:
    """Norm layers, by the name of their class, that have weights of their own."""
    for module in model.modules():
        if "Norm" in type(module).__name__ and any(True for _ in module.parameters(recurse=False)):
            yield module


def cast_weights(
    model: nn.Module, dtype: torch.dtype, *, keep_norms: bool = True, keep: Collection[nn.Parameter] = ()
) -> None:
    """Round the parameters to `dtype` in place, but for those of norms and of `keep`. Buffers, tables of positions and
    of scales, stay as they are."""
    kept = {id(param) for param in keep}
    if keep_norms:
        kept |= {id(param) for norm in find_norms(model) for param in norm.parameters(recurse=False)}
    for param in model.parameters():
        if id(param) not in kept and param.is_floating_point():
            param.data = param.data.to(dtype)


def widen_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Let norm layers compute in float32 and give `dtype`; for models that run without autocast."""
    for norm in find_norms(model):
        norm.float()
        norm.register_forward_pre_hook(_widen)
        norm.register_forward_hook(partial(_narrow, dtype))


def _widen(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (given[0].float(), *given[1:])


def _narrow(dtype: torch.dtype, module: nn.Module, given: tuple[Any, ...], result: Tensor) -> Tensor:
    return result.to(dtype)
