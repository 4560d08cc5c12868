"""Recipes and manifests that can be picked: those of the package, and files below the root."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl

from frameloom.config.loading.recipe import SHIPPED, shipped_recipes
from frameloom.core.errors import ConfigError
from frameloom.data.manifest.sources.columns import ALIASES, PATH_NAMES
from frameloom.studio.server.context import StudioContext

SHIPPED_MARK = "shipped: "
_MAX_LISTED = 500
_MAX_BYTES = 256 * 1024
_KEYS = ("_base_:", "task:", "model:", "vae:", "data:", "train:", "optim:", "name:")


def list_recipes(context: StudioContext) -> list[str]:
    """Files first, then the shipped ones; the names are what `find_recipe_file` takes."""
    files: list[str] = []
    for path in context.find_files(".yaml", ".yml"):
        if len(files) == _MAX_LISTED:
            break
        if _looks_like_recipe(path):
            files.append(context.name_of(path))
    return [*files, *(f"{SHIPPED_MARK}{name}" for name, _ in shipped_recipes())]


def find_recipe_file(context: StudioContext, name: str) -> Path:
    """The file behind a name of the list; nothing outside the root and the package is found."""
    if name.startswith(SHIPPED_MARK):
        known = {shipped for shipped, _ in shipped_recipes()}
        if name.removeprefix(SHIPPED_MARK) not in known:
            raise ConfigError(f"{name}: no shipped recipe of that name; pick one from the list")
        return SHIPPED / f"{name.removeprefix(SHIPPED_MARK)}.yaml"
    path = context.resolve(name, where="recipe")
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise ConfigError(f"{name}: no such recipe; pick one from the list")
    return path


def _looks_like_recipe(path: Path) -> bool:
    try:
        if path.stat().st_size > _MAX_BYTES:
            return False
        with path.open(encoding="utf-8") as file:
            return any(line.startswith(_KEYS) for line in file)
    except (OSError, UnicodeDecodeError):
        return False


SUFFIXES = (".parquet", ".csv", ".jsonl")
_CAPTIONS = {"caption", "captions", *ALIASES["caption"]}
_HEAD_BYTES = 1 << 16


def list_manifests(context: StudioContext) -> list[str]:
    """Names relative to the root, in order."""
    found: list[str] = []
    for path in context.find_files(*SUFFIXES):
        if len(found) == _MAX_LISTED:
            break
        columns = set(read_columns(path))
        if columns & set(PATH_NAMES) and columns & _CAPTIONS:
            found.append(context.name_of(path))
    return found


def read_columns(path: Path) -> list[str]:
    """The columns from the head of a file alone; none for one that is no table."""
    try:
        if path.suffix == ".parquet":
            return list(pl.read_parquet_schema(path))
        with path.open("rb") as file:
            line = file.readline(_HEAD_BYTES).decode("utf-8-sig")
        if path.suffix == ".csv":
            return [name.strip().strip('"') for name in line.split(",")]
        first = json.loads(line)
        return list(first) if isinstance(first, dict) else []
    except (pl.exceptions.PolarsError, OSError, ValueError):
        return []
