"""Key layouts of published LoRA files, read and written.

    layout     keys                                                      written by
    kohya      lora_unet_<layer with _ for .>.lora_down.weight, .alpha   kohya, CogVideoX-Fun
    diffusers  unet.<layer>.lora_A.weight, transformer.<layer>.lora_B…   diffusers, peft (base_model.model.<layer>)
    older      unet.<layer>.lora.down.weight; …processor.to_q_lora.down  diffusers before peft

Layers of SDXL are also called by their names in Stability's single files. Diffusers has no keys for alpha: it stands in
the file's notes, peft's in `adapter_config.json`.

Shape letters: R rank, I inputs, O outputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from frameloom.core.errors import CheckpointError
from frameloom.models.lora.adapters import Adapter
from frameloom.models.state_dict import shorten

NOTES = "lora_adapter_metadata"  # diffusers' note with the settings, as JSON

_KEY = re.compile(r"(.+?)\.(lora_A|lora_down|lora\.down|lora_B|lora_up|lora\.up)(?:\.default)?\.weight")
_PARTS = {"lora_A": "down", "lora_down": "down", "lora.down": "down"}
_PROCESSOR = re.compile(r"\.processor\.(to_[qkv]|to_out)_lora\.(down|up)\.")
_KOHYA = "lora_unet_"
_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", "unet.")


@dataclass(frozen=True)
class LoraNames:
    """How LoRA files call a family and its layers.

    `part` is its name in a diffusers pipeline, `root` what kohya keys begin with. `single`, called with all linear
    layers of the model, gives the names that they have in single files, which kohya keys then use.
    """

    part: str = "transformer"
    root: str = _KOHYA
    single: Callable[[Iterable[str]], Mapping[str, str]] = lambda layers: {}


# Of families that published files have no other names for.
TRANSFORMER_NAMES = LoraNames()


def read_adapters(
    tensors: Mapping[str, Tensor], layers: Iterable[str], names: LoraNames, *, alpha: float | None, where: str
) -> dict[str, Adapter]:
    """Adapters by layer, from a file of any layout; CheckpointError lists what belongs to none of `layers`.

    `alpha` is for layers without one of their own; None: not known.
    """
    known = list(layers)
    table = {_flatten(name): name for name in known}
    table |= {_flatten(other): name for name, other in names.single(known).items()}
    found: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key in tensors:
        layer, part = _parse(key)
        path = table.get(_flatten_key(layer)) if part else None
        if path is None:
            unknown.append(key)
        else:
            found.setdefault(path, {})[part] = tensors[key]
    halves = sorted(layer for layer, parts in found.items() if not {"down", "up"} <= parts.keys())
    _refuse(unknown, halves, len(tensors), where)
    return {
        layer: Adapter(parts["down"], parts["up"], float(parts["alpha"]) if "alpha" in parts else alpha)
        for layer, parts in found.items()
    }


def _refuse(unknown: list[str], halves: list[str], num_tensors: int, where: str) -> None:
    problems = []
    if unknown:
        problems.append(f"{len(unknown)} of {num_tensors} keys belong to no linear layer ({shorten(sorted(unknown))})")
    if halves:
        problems.append(f"{len(halves)} layers have only one half of an adapter ({shorten(halves)})")
    if not num_tensors:
        problems.append("it holds no tensors")
    if problems:
        raise CheckpointError(
            f"{where} does not fit the model: {'; '.join(problems)}; choose the family and size that it was made for"
        )


def _parse(key: str) -> tuple[str, str]:
    """Layer and part (down, up, alpha) of a key; the part is empty for other keys."""
    key = _PROCESSOR.sub(lambda match: f".{match[1]}{'.0' if match[1] == 'to_out' else ''}.lora.{match[2]}.", key)
    if match := _KEY.fullmatch(key):
        return match[1], _PARTS.get(match[2], "up")
    return (key.removesuffix(".alpha"), "alpha") if key.endswith(".alpha") else (key, "")


def _flatten(layer: str) -> str:
    return layer.replace(".", "_")


def _flatten_key(layer: str) -> str:
    """Without what stands before the path; CogVideoX-Fun has two underscores there."""
    if layer.startswith(_KOHYA):
        return layer.removeprefix(_KOHYA).lstrip("_")
    for prefix in _PREFIXES:
        layer = layer.removeprefix(prefix)
    return _flatten(layer)


def write_kohya(adapters: Mapping[str, Adapter], layers: Iterable[str], names: LoraNames) -> dict[str, Tensor]:
    """`layers` are all linear layers of the model."""
    single = names.single(layers)
    result: dict[str, Tensor] = {}
    for layer, one in adapters.items():
        key = f"{names.root}{_flatten(single.get(layer, layer))}"
        result[f"{key}.lora_down.weight"] = one.down_RI
        result[f"{key}.lora_up.weight"] = one.up_OR
        result[f"{key}.alpha"] = torch.tensor(one.usual_alpha, dtype=one.down_RI.dtype)
    return result


def write_diffusers(adapters: Mapping[str, Adapter], names: LoraNames) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, and the note that says rank and alpha, which must be the same for all layers."""
    result: dict[str, Tensor] = {}
    for layer, one in adapters.items():
        result[f"{names.part}.{layer}.lora_A.weight"] = one.down_RI
        result[f"{names.part}.{layer}.lora_B.weight"] = one.up_OR
    ((rank, alpha),) = {(one.rank, one.usual_alpha) for one in adapters.values()}
    settings = {"r": rank, "lora_alpha": alpha, "target_modules": sorted(adapters), "bias": "none"}
    content = {f"{names.part}.{key}": value for key, value in settings.items()}
    return result, {NOTES: json.dumps(content, indent=2, sort_keys=True), "format": "pt"}


def parse_alpha(text: str | bytes, *, where: str) -> float | None:
    """The alpha of diffusers' note or of peft's `adapter_config.json`; None when they do not say.

    Settings that change what the tensors mean are refused.
    """
    try:
        content = json.loads(text)
        settings = {str(key).rpartition(".")[2]: value for key, value in content.items()}
    except (ValueError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"{where}: its settings are not a JSON object; download or export it again") from error
    for name in ("use_rslora", "use_dora", "alpha_pattern", "fan_in_fan_out"):
        if settings.get(name):
            raise CheckpointError(f"{where}: has {name} {settings[name]}, which is not read here; choose a plain LoRA")
    alpha = settings.get("lora_alpha")
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0):
        raise CheckpointError(f"{where}: its lora_alpha is {alpha!r}; expected a number above 0")
    return alpha
