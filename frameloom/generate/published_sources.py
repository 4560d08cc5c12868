"""Published checkpoints to sample from: which shipped recipe describes one, and which of its parts lie in a folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from frameloom.checkpoint.weight_files import find_weights
from frameloom.config.load import load_recipe
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.json_objects import read_object
from frameloom.core.spelling import refuse_unknown
from frameloom.diffusion.ddpm import DDPMObjective
from frameloom.diffusion.published import read_scheduler
from frameloom.generate.published import find_config_reader
from frameloom.models.registry import DENOISERS, get_denoiser, get_vae
from frameloom.models.spec import DenoiserSpec, VAESpec

# The shipped recipe whose autoencoder, text encoders, objective and sizes go with most weights of a family.
_RECIPES = {
    "cogvideox_fun": "cogvideox_fun/2b-t2v",
    "latte": "latte/65x512x512",
    "opensora2": "opensora2/stage1",
    "opensora_plan": "opensora_plan/stage3",
    "sdxl": "sdxl/finetune",
}
# Follow from the autoencoder and the text encoders, so a recipe does not set them; or no published file says them.
_NOT_READ = ("in_channels", "context_in_dim", "vec_in_dim", "mask_scale")
_SCHEDULER = Path("scheduler", "scheduler_config.json")


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


def find_objective(path: Path) -> DDPMObjective | None:
    """The schedule that a pipeline's own scheduler file describes; None where there is none."""
    file = path / _SCHEDULER
    if not file.is_file():
        return None
    return read_scheduler(read_object(file, error=CheckpointError, fix="download it again"))
