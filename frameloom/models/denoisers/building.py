"""Denoisers with fresh weights, and the blocks that repeat in them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar, cast

import torch
from torch import nn

from frameloom.core.random import stream

Model = TypeVar("Model", bound=nn.Module)

_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def build_fresh(
    make: Callable[[], Model],
    generator: torch.Generator | None,
    *,
    family: str,
    is_zero: Callable[[str], bool] = lambda name: False,
    finish: Callable[[Model, torch.Generator], None] = lambda model, generator: None,
) -> Model:
    """What `make` makes, with weights from `initialize`, then `finish`; under `torch.device("meta")`, shapes only."""
    device = torch.get_default_device()
    # Made without storage first: layers would otherwise fill themselves from the global generator.
    with torch.device("meta"):
        model = make()
    if device.type == "meta":
        return model
    model.to_empty(device=device)
    if generator is None:
        generator = stream(0, f"{family} weights", device=device.type)
    initialize(model, generator, is_zero=is_zero)
    finish(model, generator)
    return model


def initialize(
    model: nn.Module, generator: torch.Generator, *, is_zero: Callable[[str], bool] = lambda name: False
) -> None:
    """Fill every parameter from `generator`, in the order of the modules; no other random state is read or changed.

    Linear and convolution layers get PyTorch's usual uniform law, +-1/sqrt(inputs); norms start as identity;
    modules for whose name `is_zero` holds start as zeros. A module with parameters of its own kind has a method
    `initialize_parameters(generator)`.
    """
    with torch.no_grad():
        for name, module in model.named_modules():
            parameters = dict(module.named_parameters(recurse=False))
            if is_zero(name):
                for parameter in parameters.values():
                    parameter.zero_()
            elif isinstance(module, _LINEAR):
                bound = module.weight[0].numel() ** -0.5
                for parameter in parameters.values():
                    parameter.uniform_(-bound, bound, generator=generator)
            elif parameters:
                _initialize_other(name, module, generator)


def _initialize_other(name: str, module: nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, _NORMS):
        for key, parameter in module.named_parameters(recurse=False):
            parameter.fill_(1.0 if key == "weight" else 0.0)
    elif isinstance(module, nn.Embedding):
        module.weight.normal_(generator=generator)
    elif callable(own := getattr(module, "initialize_parameters", None)):
        own(generator)
    else:
        raise TypeError(f"{name}: no rule to initialize a {type(module).__name__}; give it initialize_parameters")


def list_blocks(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """The blocks of all lists called `names`, one list after the other."""
    return [block for name in names for block in cast(nn.ModuleList, getattr(model, name))]
