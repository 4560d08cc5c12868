"""Models below a folder that can be sampled from, and the settings that each of them supports."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.rules.data import frame_problem
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.sampling import SampleSection
from frameloom.core.errors import FrameloomError
from frameloom.diffusion.sampler_table import SAMPLERS
from frameloom.models.registry import DENOISERS, VAES
from frameloom.studio.runs.run_list import RECIPE, is_run_folder, walk_folders

_CONFIG, _TENSORS = "config.json", "model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_RESCAN_S = 5.0
_SOME_LENGTHS = range(2, 34)


@dataclass(frozen=True)
class ModelPlace:
    """A run with a checkpoint, or an exported folder: `name` is its path from the root, `recipe` what describes it."""

    name: str
    path: Path
    recipe: Path
    kind: str


@dataclass(frozen=True)
class ModelFacts:
    """What a model is, its own settings, and what it can be given. A `problem` says why it cannot be used."""

    family: str = ""
    settings: SampleSection = field(default_factory=SampleSection)
    samplers: tuple[str, ...] = ("default",)
    takes_image: bool = False
    makes_clips: bool = True
    frame_rule: str = ""
    problem: str = ""


def find_models(root: Path) -> list[ModelPlace]:
    """Runs of denoisers first to last by name, then exported folders."""
    found = []
    for relative, names in walk_folders(root, lambda relative, names: is_run_folder(root / relative, names)):
        path = root / relative
        if is_run_folder(path, names):
            if _has_checkpoint(path / "checkpoints"):
                found.append(ModelPlace(relative, path, path / RECIPE, "run"))
        elif _CONFIG in names and _TENSORS in names and _is_denoiser(path / _CONFIG):
            recipe = next((place for place in (path / RECIPE, path.parent / RECIPE) if place.is_file()), None)
            if recipe is not None:
                found.append(ModelPlace(relative, path, recipe, "export"))
    return sorted(found, key=lambda place: (place.kind != "run", place.name))


def read_model_facts(recipe: Path) -> ModelFacts:
    try:
        loaded = load_recipe(recipe)
    except (FrameloomError, OSError) as error:
        return ModelFacts(problem=str(error).partition("\n")[0])
    if loaded.task != "denoiser":
        return ModelFacts(problem=f"{recipe.parent.name}: is an autoencoder; videos are made by a denoiser")
    vae = VAES[loaded.vae.name]
    return ModelFacts(
        family=loaded.model.family,
        settings=loaded.sample,
        samplers=SAMPLERS[loaded.objective.kind],
        takes_image=takes_image(loaded),
        makes_clips=makes_clips(loaded),
        frame_rule=vae.lengths().describe(),
    )


def takes_image(recipe: Recipe) -> bool:
    """Whether frames can be given: the recipe trained with known ones, or names a model that is made for it."""
    model = recipe.model
    if "known" not in DENOISERS[model.family].conditions:
        return False
    chosen = model.overrides
    is_made_for_it = chosen.get("cond_embed") or chosen.get("inpaint") or chosen.get("condition") == "inpaint"
    return recipe.known is not None or bool(is_made_for_it) or model.size.endswith("inpaint")


def makes_clips(recipe: Recipe) -> bool:
    """False for a family of pictures."""
    vae = VAES[recipe.vae.name]
    can = any(frame_problem(recipe, vae, frames) is None for frames in _SOME_LENGTHS)
    return can and not (recipe.sample.frames == 1 and vae.strides[0] == 1)


class ModelIndex:
    """The models below `root`; searched anew when the last search is some seconds old."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._places: dict[str, ModelPlace] = {}
        self._facts: dict[str, tuple[int, ModelFacts]] = {}
        self._searched = float("-inf")
        self._lock = threading.Lock()

    def places(self) -> dict[str, ModelPlace]:
        with self._lock:
            if time.monotonic() - self._searched > _RESCAN_S:
                usable = [place for place in find_models(self.root) if not self._read(place).problem]
                self._places = {place.name: place for place in usable}
                self._searched = time.monotonic()
            return dict(self._places)

    def get(self, name: str) -> ModelPlace | None:
        """A model by a name that a page sent: only what the search has found is opened."""
        return self.places().get(name)

    def facts(self, name: str) -> ModelFacts:
        place = self.get(name)
        with self._lock:
            return ModelFacts(problem=f"{name}: no such model any more") if place is None else self._read(place)

    def _read(self, place: ModelPlace) -> ModelFacts:
        try:
            changed = place.recipe.stat().st_mtime_ns
        except OSError:
            return ModelFacts(problem=f"{place.name}: its recipe is gone")
        known = self._facts.get(place.name)
        if known is None or known[0] != changed:
            known = (changed, read_model_facts(place.recipe))
            self._facts[place.name] = known
        return known[1]


def _has_checkpoint(folder: Path) -> bool:
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(name.startswith("step-") and (folder / name / "state.json").is_file() for name in names)


def _is_denoiser(config: Path) -> bool:
    try:
        if config.stat().st_size > _MAX_CONFIG_BYTES:
            return False
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("kind") == "denoiser" and "sha256" in content
