"""Paths of a run's recipe, seen from where the run was started.

A recipe names its parts by paths that lead from the folder in which `frameloom train` was called. Sampled from another
folder, they would lead nowhere, or to the parts of another project.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from frameloom.config.overrides import parse_overrides
from frameloom.config.schema import Recipe

Named = TypeVar("Named", bound=BaseModel)


def place_parts(recipe: Recipe, run: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run with the paths of its models made to work here; those of `overrides` lead from here anyway.

    A run that was moved or renamed tells no longer where it was started: its paths stay as they are.
    """
    start = _find_start(run.resolve(), Path(recipe.run.folder, recipe.name))
    if start is None:
        return recipe
    given = [override.path for override in parse_overrides(overrides)[0]]

    def place(section: Named, key: str, *path: str) -> Named:
        name = getattr(section, key)
        is_given = any(path[: len(one)] == one for one in given)
        if name is None or is_given or not (start / name).exists():
            return section
        return section.model_copy(update={key: str(start / name)})

    encoders = [place(encoder, "path", "text", "encoders") for encoder in recipe.text.encoders]
    encoders = [place(encoder, "tokenizer", "text", "encoders") for encoder in encoders]
    return recipe.model_copy(
        update={
            "vae": place(recipe.vae, "weights", "vae", "weights"),
            "model": place(recipe.model, "weights", "model", "weights"),
            "text": recipe.text.model_copy(update={"encoders": tuple(encoders)}),
        }
    )


def _find_start(run: Path, tail: Path) -> Path | None:
    """The folder from which `tail` leads to the run."""
    if tail.is_absolute() or len(tail.parts) > len(run.parents):
        return None
    start = run.parents[len(tail.parts) - 1]
    return start if start / tail == run else None
