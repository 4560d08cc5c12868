"""Building of denoisers: fresh weights, lists of repeated blocks, sequence groups.

After `use_sequence_group` the model is called as before, by all ranks of the group with the same tensors (noise, noise
levels, captions, conditions); each gets the whole prediction. For training, the gradients of all weights must then be
joined over the group, by the group's `reduction`; for sampling there is nothing else to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar, cast

import torch
from torch import nn

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.distributed.sequence_parallel import Exchange, SequenceGroup, set_sequence_group
from frameloom.models.spec import DenoiserSpec

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


def use_sequence_group(
    family: DenoiserSpec, model: nn.Module, group: SequenceGroup, *, key: str = "parallel.sequence"
) -> None:
    """Let `group` share the tokens of every clip that the model sees from now on; a group of one undoes it.

    Weights stay where they are. Comes at any time after the model is built, before or behind recompute and compile.
    `key` is what a person has set, for the words of an error.
    """
    check_degree(family, model.config, group.degree, key=key)
    set_sequence_group(model, group)


def check_degree(family: DenoiserSpec, config: object, degree: int, *, key: str = "parallel.sequence") -> None:
    """ConfigError when so many ranks cannot share the heads of a model's attention."""
    if degree == 1:
        return
    if family.num_heads is None:
        raise ConfigError(
            f"{key} is {degree}, but the tokens of {family.name} cannot be divided over ranks; set it to 1"
        )
    num_heads = family.num_heads(config)
    if num_heads % degree:
        fitting = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
        raise ConfigError(
            f"{key} is {degree}, but this {family.name} has {num_heads} attention heads, and ranks take "
            f"equally many; set it to one of {', '.join(map(str, fitting))}"
        )


def no_exchanges(config: object, latent_FHW: tuple[int, int, int], num_text: int, degree: int) -> list[Exchange]:
    """Of a family whose tokens cannot be divided over ranks."""
    return []
