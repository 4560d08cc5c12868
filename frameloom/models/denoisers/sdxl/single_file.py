"""Conversion between Stability's single file of SDXL and diffusers' folders: UNet, autoencoder, both text encoders.

    part             prefix in the file                        notes
    unet             model.diffusion_model.
    vae              first_stage_model.
    text_encoder     conditioner.embedders.0.transformer.      CLIP-L; base only
    text_encoder_2   conditioner.embedders.1.model.            OpenCLIP bigG; embedders.0.model. in the refiner

Whole files: `from_single_file`, `to_single_file`. One tensor at a time, so that memory stays small: `split_tensor` for
the one way; `plan_single_file` and then `join_tensor` for the other, where q, k and v of bigG become one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from frameloom.core.errors import CheckpointError
from frameloom.models.denoisers.sdxl.keys import (
    LOGIT_SCALE,
    POSITION_IDS,
    UNetNames,
    join_open_clip,
    open_clip_to_folder,
    open_clip_to_single,
    split_open_clip,
    wrap_text,
)
from frameloom.models.vaes import image_keys
from frameloom.models.vaes.kl.weights import VAE_PREFIX

Part = Literal["unet", "vae", "text_encoder", "text_encoder_2"]
UNET_PREFIX = "model.diffusion_model."
PREFIXES: dict[str, Part] = {
    UNET_PREFIX: "unet",
    VAE_PREFIX: "vae",
    "conditioner.embedders.0.transformer.": "text_encoder",
    "conditioner.embedders.1.model.": "text_encoder_2",
    "conditioner.embedders.0.model.": "text_encoder_2",
}
_REFINER_TEXT = "conditioner.embedders.0.model."
_SHOWN = 8


def read_unet_names(keys: Iterable[str]) -> UNetNames:
    """The map of the UNet in a single file with these keys."""
    return UNetNames.read(key.removeprefix(UNET_PREFIX) for key in keys if key.startswith(UNET_PREFIX))


def map_key(key: str, names: UNetNames) -> tuple[Part, list[str]] | None:
    """Where a tensor of the single file goes: its part and its names there. None if no rule covers the key.

    Three names are q, k and v; no name means that the folders do not keep the tensor.
    """
    part, inner = _split_prefix(key)
    if part is None:
        return None
    if part == "text_encoder":
        return part, [] if inner.endswith(POSITION_IDS) else [inner]
    if part == "text_encoder_2":
        found = open_clip_to_folder(inner)
        return (part, found) if found or inner == LOGIT_SCALE else None
    name = names.to_folder(inner) if part == "unet" else image_keys.to_folder(inner)
    return (part, [name]) if name else None


def split_tensor(key: str, tensor: Tensor, names: UNetNames) -> list[tuple[Part, str, Tensor]]:
    """One tensor of the single file as (part, name, tensor) of the folders, without copies where names alone change."""
    found = map_key(key, names)
    if found is None:
        raise _refuse([key])
    part, folder_names = found
    if part == "text_encoder_2":
        pieces = split_open_clip(_split_prefix(key)[1], tensor)
        return [(part, name, piece) for name, piece in pieces.items()]
    if part == "vae":
        tensor = image_keys.tensor_to_folder(folder_names[0], tensor)
    return [(part, name, tensor) for name in folder_names]


def from_single_file(tensors: Mapping[str, Tensor]) -> dict[Part, dict[str, Tensor]]:
    """The parts of a single file with the keys of diffusers' folders; a key that belongs to no part is an error."""
    names = read_unet_names(tensors)
    unknown = [key for key in tensors if map_key(key, names) is None]
    if unknown:
        raise _refuse(unknown)
    parts: dict[Part, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        for part, name, piece in split_tensor(key, tensor, names):
            parts.setdefault(part, {})[name] = piece
    return parts


def plan_single_file(keys: Mapping[Part, Iterable[str]], *, refiner: bool = False) -> dict[str, tuple[Part, list[str]]]:
    """Each tensor of the single file, and of which tensors of which part `join_tensor` makes it."""
    if refiner and "text_encoder" in keys:
        raise CheckpointError("sdxl refiner: its single file has no place for text_encoder; leave that part out")
    prefixes = {part: prefix for prefix, part in reversed(PREFIXES.items())}
    if refiner:
        prefixes["text_encoder_2"] = _REFINER_TEXT
    plan: dict[str, tuple[Part, list[str]]] = {}
    pieces: dict[str, dict[int, str]] = {}
    for part, part_keys in keys.items():
        names = UNetNames.read(part_keys := list(part_keys)) if part == "unet" else None
        for key in part_keys:
            target = _to_single(part, key, names)
            if target is None:
                if not key.endswith(POSITION_IDS):
                    raise CheckpointError(f"sdxl {part}: '{key}' has no place in a single file; is it another model's?")
                continue
            name, place = prefixes[part] + target[0], target[1]
            pieces.setdefault(name, {})[place] = key
            plan[name] = (part, [pieces[name][index] for index in sorted(pieces[name])])
    for name, (part, sources) in plan.items():
        if ".in_proj_" in name and len(sources) != 3:
            raise CheckpointError(
                f"sdxl {part}: {name} is made of q, k and v, but only {', '.join(sources)} is there; copy it again"
            )
    return plan


def join_tensor(single_key: str, sources: Sequence[Tensor]) -> Tensor:
    """The tensor of the single file from those that `plan_single_file` names for it."""
    part, inner = _split_prefix(single_key)
    if part == "text_encoder_2":
        return join_open_clip(inner, sources)
    return image_keys.tensor_to_single(inner, sources[0]) if part == "vae" else sources[0]


def to_single_file(
    parts: Mapping[Part, Mapping[str, Tensor]], *, refiner: bool = False, logit_scale: Tensor | None = None
) -> dict[str, Tensor]:
    """One file from the tensors of diffusers' folders; any of the parts may be absent.

    `logit_scale` is the number of bigG that the folders do not keep; published files have it, readers do not need it.
    """
    plan = plan_single_file(parts, refiner=refiner)
    result = {
        key: join_tensor(key, [parts[part][source] for source in sources]) for key, (part, sources) in plan.items()
    }
    if logit_scale is not None:
        prefix = _REFINER_TEXT if refiner else "conditioner.embedders.1.model."
        result[prefix + LOGIT_SCALE] = logit_scale
    return result


def _to_single(part: Part, key: str, names: UNetNames | None) -> tuple[str, int] | None:
    if part == "text_encoder_2":
        return open_clip_to_single(key)
    if part == "text_encoder":
        name = None if key.endswith(POSITION_IDS) else wrap_text(key)
    elif part == "vae":
        name = image_keys.to_single(key)
    else:
        name = names.to_single(key) if names is not None else None
    return (name, 0) if name else None


def _split_prefix(key: str) -> tuple[Part | None, str]:
    for prefix, part in PREFIXES.items():
        if key.startswith(prefix):
            return part, key.removeprefix(prefix)
    return None, key


def _refuse(unknown: Sequence[str]) -> CheckpointError:
    more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    return CheckpointError(
        f"SDXL single file: {len(unknown)} keys belong to no part of it ({', '.join(unknown[:_SHOWN])}{more}); "
        f"prefixes are {', '.join(PREFIXES)}; choose a file of SDXL base or refiner"
    )
