"""One model at a time, kept between requests: settings change without loading it again, new weights are noticed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from frameloom.config.load import load_recipe
from frameloom.config.schema import Recipe
from frameloom.core.errors import RunError
from frameloom.core.files import digest_value
from frameloom.generate.load import RECIPE, Source, open_sampler
from frameloom.generate.pipeline import Sampler
from frameloom.generate.prompt_notes import build_note
from frameloom.generate.prompts import ROW_SETTINGS

_WEIGHTS = ("checkpoints/step-*/state.json", "config.json", "export/config.json", "*.safetensors")
# Learnt words are a setting of a request by name, but stand in the text encoder.
_BUILT_IN = {"words"}


class ModelKeeper:
    """`open` gives what `open_sampler` would; `tell` hears when that takes a while."""

    def __init__(self, tell: Callable[[str], object] = lambda text: None) -> None:
        self._tell = tell
        self._key = ""
        self._sampler: Sampler | None = None
        self.num_loaded = 0

    def open(self, source: Source) -> Sampler:
        recipe = _read_recipe(source)
        key = _find_key(source, recipe)
        if self._sampler is None or key != self._key:
            self.drop()
            self._tell(f"loading {source.path}")
            self._sampler = open_sampler(source)
            self._key = key
            self.num_loaded += 1
        origin = {**self._sampler.origin, **source.describe()}
        return replace(self._sampler, settings=recipe.sample, origin=origin, note=build_note(recipe))

    def drop(self) -> None:
        """Free the model before another one takes its place."""
        self._sampler, self._key = None, ""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _read_recipe(source: Source) -> Recipe:
    places = [Path(source.recipe)] if source.recipe else [source.path / RECIPE, source.path.parent / RECIPE]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise RunError(f"{source.path}: has no {RECIPE}, in it or beside it; it may have been moved, choose another")
    return load_recipe(found, source.overrides)


def _find_key(source: Source, recipe: Recipe) -> str:
    """Changes with all that a model is built from, but not with the settings of a single request."""
    built = recipe.model_dump(mode="json")
    of_request = set(ROW_SETTINGS) - _BUILT_IN
    built["sample"] = {name: value for name, value in built["sample"].items() if name not in of_request}
    files = [path for pattern in _WEIGHTS for path in sorted(source.path.glob(pattern))]
    return digest_value([str(source.path), source.step, built, [_stamp(path) for path in files]])


def _stamp(path: Path) -> tuple[str, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # a run that trains on has deleted an old checkpoint meanwhile
    return str(path), status.st_mtime_ns, status.st_size
