"""Models below a folder that can be sampled from, and what each of them supports."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.rules.models import frame_problem
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.sampling import SampleSection
from frameloom.core.errors import FrameloomError
from frameloom.diffusion.tables import SAMPLERS
from frameloom.models.registry import DENOISERS, VAES
from frameloom.studio.runs.run_list import RECIPE, is_run_folder
from frameloom.studio.server.context import walk_folders

_CONFIG, _TENSORS = "config.json", "model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_SOME_LENGTHS = range(2, 34)


@dataclass(frozen=True)
class StudioModel:
    """A run with a checkpoint, or an exported folder: its path from the root, recipe, default settings and inputs."""

    name: str = ""
    recipe: Path = Path()
    is_run: bool = True
    family: str = ""
    settings: SampleSection = field(default_factory=SampleSection)
    samplers: tuple[str, ...] = ("default",)
    takes_image: bool = False
    makes_clips: bool = True
    frame_rule: str = ""


def find_models(root: Path) -> dict[str, StudioModel]:
    """By name: runs of denoisers first, then exported folders; a model whose recipe cannot be used is left out."""
    found = []
    for name, names in walk_folders(root, lambda relative, names: is_run_folder(root / relative, names)):
        path, recipe = root / name, None
        is_run = is_run_folder(path, names)
        if is_run:
            if next((path / "checkpoints").glob("step-*/state.json"), None) is not None:
                recipe = path / RECIPE
        elif _CONFIG in names and _TENSORS in names and _is_denoiser(path / _CONFIG):
            recipe = next((file for file in (path / RECIPE, path.parent / RECIPE) if file.is_file()), None)
        try:
            described = None if recipe is None else read_model(recipe, recipe.stat().st_mtime_ns)
        except OSError:
            continue
        if recipe is not None and described is not None:
            found.append(replace(described, name=name, recipe=recipe, is_run=is_run))
    return {model.name: model for model in sorted(found, key=lambda model: (not model.is_run, model.name))}


@lru_cache(maxsize=1024)
def read_model(recipe: Path, _changed_ns: int) -> StudioModel | None:
    """What a recipe says of its model; None for an autoencoder, or a recipe that cannot be read."""
    try:
        loaded = load_recipe(recipe)
    except (FrameloomError, OSError):
        return None
    if loaded.task != "denoiser":
        return None
    return StudioModel(
        family=loaded.model.family,
        settings=loaded.sample,
        samplers=SAMPLERS[loaded.objective.kind],
        takes_image=takes_image(loaded),
        makes_clips=makes_clips(loaded),
        frame_rule=VAES[loaded.vae.name].lengths().describe(),
    )


def takes_image(recipe: Recipe) -> bool:
    """Whether frames can be given: the recipe trained with known ones, or names a model that is made for it."""
    model = recipe.model
    if "known" not in DENOISERS[model.family].supported_conditions:
        return False
    chosen = model.overrides
    is_made_for_it = chosen.get("cond_embed") or chosen.get("inpaint") or chosen.get("condition") == "inpaint"
    return recipe.known is not None or bool(is_made_for_it) or model.size.endswith("inpaint")


def makes_clips(recipe: Recipe) -> bool:
    """False for a family of pictures."""
    vae = VAES[recipe.vae.name]
    can = any(frame_problem(recipe, vae, frames) is None for frames in _SOME_LENGTHS)
    return can and not (recipe.sample.frames == 1 and vae.strides[0] == 1)


def _is_denoiser(config: Path) -> bool:
    try:
        if config.stat().st_size > _MAX_CONFIG_BYTES:
            return False
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("kind") == "denoiser" and "sha256" in content
