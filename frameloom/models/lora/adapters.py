"""Low-rank adapters beside the linear layers of a frozen model: y = W x + b + (alpha / rank) * up(down(x)).

Layers are named by their path in the model (`transformer_blocks.0.attn1.to_q`). While training they stand beside their
layers (package peft); for sampling they are added into the weights.

Shape letters: R rank, I inputs, O outputs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.models.state_dict import shorten

_NAME = "default"  # what peft calls a single set of adapters
_DOWN, _UP = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"


@dataclass(frozen=True)
class Adapter:
    """What is added to one layer; `alpha` None: the file did not say, and the convention is alpha = rank."""

    down_RI: Tensor
    up_OR: Tensor
    alpha: float | None

    @property
    def rank(self) -> int:
        return self.down_RI.shape[0]

    @property
    def usual_alpha(self) -> float:
        return float(self.rank) if self.alpha is None else self.alpha


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """All layers that can have an adapter, of a model that has none yet."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def choose_layers(model: nn.Module, patterns: Sequence[str], *, where: str) -> list[str]:
    """The linear layers that `patterns` name, each at least one.

    A pattern is a path or its last parts, with * and ? as in file names: `to_q`, `attn1.to_*`, `blocks.0.*`, `*`.
    """
    known = linear_layers(model)
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in known):
            raise ConfigError(f"{where}: '{pattern}' {_explain_no_match(model, pattern, known)}")
    return [name for name in known if any(_matches(name, pattern) for pattern in patterns)]


def default_layers(model: nn.Module, patterns: Sequence[str] | None, blocks: Iterable[nn.Module]) -> list[str]:
    """The linear layers that a family's own patterns match; without patterns, all inside `blocks`."""
    if patterns is not None:
        return [name for name in linear_layers(model) if any(_matches(name, pattern) for pattern in patterns)]
    inside = {id(module) for block in blocks for module in block.modules()}
    return [name for name, layer in linear_layers(model).items() if id(layer) in inside]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _explain_no_match(model: nn.Module, pattern: str, known: Iterable[str]) -> str:
    """Something else has this name, or a linear layer has nearly this name."""
    for name, module in model.named_modules():
        if name and _matches(name, pattern):
            text = f"names {name}, a {type(module).__name__}; adapters stand beside linear layers only"
            inside = any(isinstance(part, nn.Linear) for part in module.modules())
            return f"{text}; write '{pattern}.*' for those inside" if inside else f"{text}; remove it"
    # Only as many parts of a path as the pattern has can be what was meant.
    num_parts = pattern.count(".") + 1
    endings = sorted({".".join(name.split(".")[-num_parts:]) for name in known})
    near = difflib.get_close_matches(pattern, endings, n=1, cutoff=0.0)
    return f"matches no layer of the model; did you mean '{near[0]}'? Layers end in: {shorten(endings, shown=12)}"


def add_adapters(
    model: nn.Module, layers: Sequence[str], *, rank: int, alpha: float, generator: torch.Generator
) -> None:
    """Freeze the model and put adapters beside `layers`, which alone train.

    The way down is drawn from `generator` (uniform, +-1/sqrt(inputs)), the way up starts from zeros: the model's
    output does not change. Under a model without storage they have none either.
    """
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    # An expression that matches whole paths: peft takes each name of a list for the end of a path, too.
    paths = "|".join(re.escape(name) for name in layers)
    config = LoraConfig(r=rank, lora_alpha=cast(int, alpha), target_modules=paths, bias="none")
    # Without storage at first: peft would fill them from the global generator.
    inject_adapter_in_model(config, model, adapter_name=_NAME, low_cpu_mem_usage=True)
    for name in layers:
        layer: Any = model.get_submodule(name)
        device = layer.base_layer.weight.device
        down, up = layer.lora_A[_NAME], layer.lora_B[_NAME]
        if device.type != "meta":
            down.to_empty(device=device)
            up.to_empty(device=device)
            bound = down.in_features**-0.5
            nn.init.uniform_(down.weight, -bound, bound, generator=generator)
            nn.init.zeros_(up.weight)


def parameter_names(layer: str) -> tuple[str, str]:
    """Names of the parameters down and up that `add_adapters` puts beside a layer."""
    return f"{layer}{_DOWN}", f"{layer}{_UP}"


def to_adapters(tensors: Mapping[str, Tensor], *, alpha: float) -> dict[str, Adapter]:
    """Adapters by layer, from the parameters of a model with adapters."""
    layers = [name.removesuffix(_DOWN) for name in tensors if name.endswith(_DOWN)]
    pairs = {layer: parameter_names(layer) for layer in layers}
    return {layer: Adapter(tensors[down], tensors[up], alpha) for layer, (down, up) in pairs.items()}


def check_layers(layers: Mapping[str, nn.Linear], adapters: Mapping[str, Adapter], *, where: str) -> None:
    """CheckpointError with a list unless each adapter has the inputs and outputs of its layer."""
    wrong = []
    for name, one in adapters.items():
        if name not in layers:
            wrong.append(f"{name} is no linear layer of the model")
            continue
        wanted, layer = (one.down_RI.shape, one.up_OR.shape), layers[name]
        if wanted != ((one.rank, layer.in_features), (layer.out_features, one.rank)) or not one.rank:
            shapes = " and ".join("x".join(map(str, shape)) for shape in wanted)
            wrong.append(f"{name} has {shapes} for a layer of {layer.out_features}x{layer.in_features}")
    if wrong:
        raise CheckpointError(
            f"{where} does not fit the model: {len(wrong)} of {len(adapters)} adapters ({shorten(wrong)}); "
            "choose the family and size that it was made for"
        )


@torch.no_grad()
def merge_adapters(model: nn.Module, adapters: Mapping[str, Adapter], *, strength: float = 1.0) -> None:
    """Add the adapters into the weights of a model that has none beside its layers."""
    layers = linear_layers(model)
    for name, one in adapters.items():
        weight_OI = layers[name].weight
        delta_OI = one.usual_alpha / one.rank * (one.up_OR.float() @ one.down_RI.float())
        weight_OI.add_((strength * delta_OI).to(weight_OI))
