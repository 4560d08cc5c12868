"""LoRA files read and written, and their adapters added to a denoiser.

Shape letters: R rank, I inputs of a layer, O its outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.checkpoint.model_folder import EXPORT, LORA, find_own
from frameloom.core.errors import CheckpointError
from frameloom.core.files import digest_file, replace_folder
from frameloom.core.logging import get_logger
from frameloom.models.lora.adapters import Adapter, check_layers, linear_layers, merge_adapters
from frameloom.models.lora.keys import NOTES, parse_alpha, read_adapters, write_diffusers, write_kohya
from frameloom.weights.files import CONFIG, find_weights, read_config, refuse_pickle
from frameloom.weights.lazy_tensors import defer_tensors
from frameloom.weights.safetensors_file import open_safetensors, write_safetensors

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
KOHYA_FILE = "lora-kohya.safetensors"
_PEFT_FILE, _PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_log = get_logger(__name__)


def write_lora(
    folder: Path,
    denoiser: LoadedDenoiser,
    adapters: Mapping[str, Adapter],
    *,
    layers: list[str],
    base: Mapping[str, Any],
) -> None:
    """Write the adapters in both published layouts with a description; a folder that is there is replaced.

    `layers` are all linear layers of the model; `base` says which weights the adapters belong to.
    """
    names = denoiser.family.lora_names
    diffusers, notes = write_diffusers(adapters, names)
    kohya = write_kohya(adapters, layers, names)
    with replace_folder(folder) as temporary:
        digests = {
            KOHYA_FILE: write_safetensors(temporary / KOHYA_FILE, defer_tensors(kohya)),
            DIFFUSERS_FILE: write_safetensors(temporary / DIFFUSERS_FILE, defer_tensors(diffusers), metadata=notes),
        }
        content = {"kind": LORA, "name": denoiser.family.name, "config": {"base": dict(base)}, "sha256": digests}
        (temporary / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def read_lora(path: Path, denoiser: LoadedDenoiser) -> dict[str, Adapter]:
    """The adapters of a LoRA by layer, for a model that has none yet; CheckpointError lists what does not fit.

    `path` is a file, a LoRA run, its export, or a folder that diffusers or peft wrote.
    """
    file = _find_file(path, denoiser.family.name)
    tensors, layers = open_safetensors(file), linear_layers(denoiser.model)
    # Where keys do not say alpha: in the notes of the file, or in peft's settings beside it.
    settings, alpha = file.with_name(_PEFT_CONFIG), None
    if NOTES in tensors.metadata:
        alpha = parse_alpha(tensors.metadata[NOTES], where=str(file))
    elif settings.is_file():
        alpha = parse_alpha(settings.read_bytes(), where=str(settings))
    adapters = read_adapters(tensors, layers, denoiser.family.lora_names, alpha=alpha, where=str(file))
    check_layers(layers, adapters, where=str(file))
    return adapters


def _find_file(path: Path, family: str) -> Path:
    own = find_own(path) if path.is_dir() else None
    if own is not None:
        content = read_config(own)
        if content.get("kind") != LORA:
            raise CheckpointError(f"{own}: holds a whole {content.get('kind')}, not a LoRA; name it in model.weights")
        if content.get("name") != family:
            raise CheckpointError(f"{own}: is a LoRA of the family {content.get('name')}, the model is {family}")
        file, digests = own / DIFFUSERS_FILE, content.get("sha256")
        if not isinstance(digests, dict) or not file.is_file() or digest_file(file) != digests.get(DIFFUSERS_FILE):
            raise CheckpointError(f"{file}: missing or damaged, it does not match {CONFIG}; export the LoRA again")
        return file
    for folder in (path, path / LORA):
        for name in (DIFFUSERS_FILE, _PEFT_FILE):
            if (folder / name).is_file():
                return folder / name
    if (path / "checkpoints").is_dir():
        raise CheckpointError(f"{path}: has no {EXPORT}/ yet, which a LoRA run writes at its end; let it finish first")
    found = find_weights(path)
    refuse_pickle(found)
    return found.path


def add_lora(denoiser: LoadedDenoiser, path: Path, *, strength: float, merge: bool = True) -> None:
    """Add the adapters of a file or folder to the weights of a denoiser, or let them work beside its layers."""
    adapters = read_lora(path, denoiser)
    if any(one.alpha is None for one in adapters.values()):
        _log.warning("%s: does not say its alpha; taken as equal to its rank, as diffusers does", path)
    use_adapters(denoiser, adapters, strength=strength, merge=merge)


def use_adapters(
    denoiser: LoadedDenoiser, adapters: Mapping[str, Adapter], *, strength: float, merge: bool = True
) -> None:
    """Into the weights, or beside them: then each layer adds what its adapter makes of the same input."""
    if merge:
        merge_adapters(denoiser.model, adapters, strength=strength)
        return
    layers = linear_layers(denoiser.model)
    for name, one in adapters.items():
        layers[name].register_forward_hook(_run_beside(one, strength))


def _run_beside(adapter: Adapter, strength: float) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """A hook of one layer. It follows the layer to other devices and dtypes with each call."""
    down_RI, up_OR, factor = adapter.down_RI, adapter.up_OR, strength * adapter.usual_alpha / adapter.rank

    def add(layer: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> Tensor:
        nonlocal down_RI, up_OR
        down_RI, up_OR = down_RI.to(result), up_OR.to(result)
        return result + factor * (given[0].to(result) @ down_RI.T @ up_OR.T)

    return add


def digest_lora(path: Path, denoiser: LoadedDenoiser) -> str:
    """SHA-256 of the file that `add_lora` reads."""
    return digest_file(_find_file(path, denoiser.family.name))


def check_base(denoiser: LoadedDenoiser, state: Mapping[str, Any], *, weights: str | None, where: str) -> None:
    """CheckpointError unless the adapters that `state` describes were trained beside these weights."""
    if denoiser.digest != state["base"]:
        then, now = ("fresh weights" if path is None else f"'{path}'" for path in (state["weights"], weights))
        raise CheckpointError(
            f"{where}: its adapters were trained beside {then} (digest {state['base'][:12]}), "
            f"but the model has {now} (digest {denoiser.digest[:12]}); name the same weights in "
            "model.weights, with the same size and overrides"
        )
