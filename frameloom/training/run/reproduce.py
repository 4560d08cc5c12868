"""Reproducing a run: its recipe again, from what an export, a file of one or a run folder carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frameloom.builders.data import read_manifest
from frameloom.builders.published import parse_table
from frameloom.config.loading.recipe import load_recipe, recipe_from_dict
from frameloom.config.loading.render import render_yaml
from frameloom.config.rules.check import check_files
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import CheckpointError, ConfigError, FrameloomError
from frameloom.core.files import write_text
from frameloom.interop.export.model_card import CARD, FORMAT, NOTE, read_card
from frameloom.training.run.folder import versions
from frameloom.weights.safetensors_file import open_safetensors


@dataclass(frozen=True)
class RecordedRun:
    """The recipe of an earlier run, renamed so that it gets another folder."""

    recipe: Recipe
    step: int
    fingerprint: str
    versions: dict[str, str]


def read_recorded_run(path: Path, overrides: Sequence[str] = (), *, name: str | None = None) -> RecordedRun:
    """From an export's folder, a .safetensors file of one, or a run folder."""
    table = _read_table(path)
    if table.get("format") != FORMAT or not isinstance(table.get("recipe"), dict):
        raise CheckpointError(f"{path}: its card has format {table.get('format')!r}; this version reads {FORMAT}")
    recipe = recipe_from_dict(table["recipe"], name=str(path))
    chosen = f"{recipe.name[:73]}-replay" if name is None else name
    recipe = recipe_from_dict({**table["recipe"], "name": chosen}, name="--name")
    if overrides:
        recipe = load_recipe(recipe, overrides)
    data: Any = table.get("data", {})
    return RecordedRun(recipe, int(table.get("step", 0)), str(data.get("fingerprint", "")), dict(table["trained_with"]))


def _read_table(path: Path) -> dict[str, Any]:
    if path.is_file() and path.suffix == ".safetensors":
        note = open_safetensors(path).metadata.get(NOTE)
        if note is None:
            raise CheckpointError(f"{path}: carries no card; name a file that `frameloom export` wrote")
        return parse_table(note, where=f"{path}: its note {NOTE}")
    if (path / CARD).is_file():
        return read_card(path)
    if (path / "recipe.yaml").is_file():
        from frameloom.builders.run_weights import open_run

        run = open_run(path)
        facts = {"fingerprint": run.state.get("manifest", "")}
        recipe, made_with = run.recipe.model_dump(mode="json"), run.state["versions"]
        return {"format": FORMAT, "recipe": recipe, "step": run.step, "data": facts, "trained_with": made_with}
    raise CheckpointError(
        f"{path}: holds neither {CARD} nor recipe.yaml; name a folder or a file of `frameloom export`, or a run folder"
    )


def find_differences(run: RecordedRun) -> list[str]:
    """Data, files and versions that differ; with an empty list the same machine gives the same numbers."""
    changes = []
    try:
        check_files(run.recipe)
        if (found := read_manifest(run.recipe).fingerprint) != run.fingerprint:
            changes.append(f"the data has changed: its fingerprint is {found[:12]}, it was {run.fingerprint[:12]}")
    except FrameloomError as error:
        changes += error.problems if isinstance(error, ConfigError) else [str(error)]
    now = versions()
    return changes + [
        f"{name} is {now.get(name)}, it was {version}"
        for name, version in run.versions.items()
        if now.get(name) != version
    ]


def write_recipe(run: RecordedRun, out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out}: exists already; choose another name with --out")
    write_text(out, render_yaml(run.recipe))
