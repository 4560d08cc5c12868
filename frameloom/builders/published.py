"""Recipe overrides for published checkpoints, and the config.json files that come with them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.logging import get_logger
from frameloom.core.spelling import refuse_unknown
from frameloom.core.text_files import parse_object
from frameloom.models.registry import DENOISERS, get_denoiser, get_vae
from frameloom.models.spec import DenoiserSpec, VAESpec
from frameloom.weights.files import find_weights

# The shipped recipe whose autoencoder, text encoders, objective and sizes go with most weights of a family.
_RECIPES = {
    "cogvideox_fun": "cogvideox_fun/2b-t2v",
    "latte": "latte/65x512x512",
    "opensora2": "opensora2/stage1",
    "opensora_plan": "opensora_plan/stage3",
    "sdxl": "sdxl/finetune",
}
# Classes of denoisers in published config.json files.
_CLASSES = {
    "CogVideoXTransformer3DModel": "cogvideox_fun",
    "LatteT2V": "latte",
    "LatteTransformer3DModel": "latte",
    "OpenSoraT2V_v1_3": "opensora_plan",
    "OpenSoraInpaint_v1_3": "opensora_plan",
    "UNet2DConditionModel": "sdxl",
}
# Follow from the autoencoder and the text encoders, so a recipe does not set them; or no published file says them.
_NOT_READ = ("in_channels", "context_in_dim", "vec_in_dim", "mask_scale")
_SHOWN = 6
PIPELINE_INDEX = "model_index.json"
_log = get_logger(__name__)


def name_overrides(path: Path, *, family: str | None, recipe: str | None) -> tuple[str, list[str]]:
    """The recipe that describes published weights, and overrides that point it to them.

    Parts that lie in the folder, as in a diffusers pipeline, are taken from it; the others stay as the recipe has them.
    Sizes follow from the `config.json` of a part where the family can read it.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; name weights, or the folder of a pipeline")
    if recipe is None:
        assert family is not None
        refuse_unknown(family, DENOISERS, what="family")
        recipe = _RECIPES[family]
    base = load_recipe(recipe)
    if family not in (None, base.model.family):
        raise ConfigError(f"--family {family}: the recipe {recipe} is of the family {base.model.family}; leave one out")
    words = ["--model.weights", str(path)]
    words += _architecture("model", get_denoiser(base.model.family), base.model.size, path, "denoiser")
    if (path / "vae").is_dir():
        words += ["--vae.weights", str(path)]
        words += _architecture("vae", get_vae(base.vae.name), base.vae.size, path, "vae")
    if any((path / name).is_dir() for name in ("text_encoder", "tokenizer")):
        encoders = [item.model_dump(exclude_none=True) | {"path": str(path)} for item in base.text.encoders]
        words += ["--text.encoders", json.dumps(encoders)]
    return recipe, words


def find_family(path: Path) -> str | None:
    """The family that the config.json of published weights names; None where it names none that we know."""
    try:
        config = find_weights(path, kind="denoiser").config
    except CheckpointError:
        return None
    family = _CLASSES.get(str(config.get("_class_name")))
    # Other Stable Diffusions have the same class.
    return None if family == "sdxl" and config.get("addition_embed_type") != "text_time" else family


def _architecture(section: str, family: DenoiserSpec | VAESpec, size: str, path: Path, kind: str) -> list[str]:
    """Fields of the published config.json that differ from the named size."""
    found, read = find_weights(path, kind=kind).config, find_config_reader(family)
    if not found or read is None:
        return []
    theirs, ours = read(found), family.sizes[size]
    different: dict[str, Any] = {
        field.name: getattr(theirs, field.name)
        for field in dataclasses.fields(ours)
        if field.name not in _NOT_READ and getattr(theirs, field.name) != getattr(ours, field.name)
    }
    return [f"--{section}.overrides", json.dumps(different)] if different else []


def warn_of_differences(
    family: DenoiserSpec | VAESpec, config: Any, published: Mapping[str, Any], *, key: str, path: str
) -> None:
    """Tell where the architecture of the recipe is not that of the config.json beside the weights.

    Weights that do not fit are refused anyway; but a setting such as the scale of positions leaves no trace in them.
    """
    read = find_config_reader(family)
    if read is None or not published:
        return
    try:
        theirs = read(published)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        _log.warning("%s: its config.json is not understood (%s); the recipe's %s is used", path, error, key)
        return
    different = [
        f"{field.name} {getattr(theirs, field.name)!r} there, {getattr(config, field.name)!r} here"
        for field in dataclasses.fields(config)
        if getattr(theirs, field.name) != getattr(config, field.name)
    ]
    if different:
        more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        _log.warning("%s: its config.json differs from %s: %s%s", path, key, "; ".join(different[:_SHOWN]), more)


def find_config_reader(family: DenoiserSpec | VAESpec) -> Callable[[Mapping[str, Any]], Any] | None:
    """From a published config.json to the family's config; None if the family reads none.

    A `config_class.from_original` counts where it takes the published table, not some other form of it.
    """
    read = getattr(weights_module(family), "read_config", None)
    if read is None:
        read = getattr(family.config_class, "from_original", None)
        if read is not None and "values" not in inspect.signature(read).parameters:
            read = None
    return read


def weights_module(family: DenoiserSpec | VAESpec) -> ModuleType:
    return sys.modules[family.load_original.__module__]


def read_pipeline_index(path: Path) -> dict[str, Any]:
    """What a diffusers pipeline says of its parts; empty for anything else."""
    return read_table(path / PIPELINE_INDEX)


def read_table(path: Path) -> dict[str, Any]:
    """A JSON object; empty for a file that is not there."""
    return parse_table(path.read_bytes(), where=str(path)) if path.is_file() else {}


def parse_table(text: str | bytes, *, where: str) -> dict[str, Any]:
    """A JSON object in a file or a note."""
    return parse_object(text, where=where, error=CheckpointError, fix="copy it again")
