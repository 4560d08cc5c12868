"""Lists of the recipes and manifests below a folder, and edits of one key in the text of a recipe."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl

from frameloom.config.loading.recipe import SHIPPED, shipped_recipes
from frameloom.config.loading.yaml_values import KeyPath, format_key, format_value, parse_document
from frameloom.core.errors import ConfigError
from frameloom.data.manifest.sources.columns import ALIASES, PATH_NAMES
from frameloom.studio.server.context import StudioContext

SHIPPED_MARK = "shipped: "
_MAX_LISTED = 500
_MAX_BYTES = 256 * 1024
_KEYS = ("_base_:", "task:", "model:", "vae:", "data:", "train:", "optim:", "name:")


def list_recipes(context: StudioContext) -> list[str]:
    """Files first, then the shipped ones; the names are what `find_recipe_file` takes."""
    files = (context.name_of(path) for path in context.find_files(".yaml", ".yml") if _looks_like_recipe(path))
    return [*islice(files, _MAX_LISTED), *(f"{SHIPPED_MARK}{name}" for name, _ in shipped_recipes())]


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
    """Names relative to the root, in order, of tables with paths and captions."""
    tables = ((path, set(read_columns(path))) for path in context.find_files(*SUFFIXES))
    found = (context.name_of(path) for path, names in tables if names & set(PATH_NAMES) and names & _CAPTIONS)
    return list(islice(found, _MAX_LISTED))


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


_VALUE = re.compile(r"^(\s*(?:[\w.-]+|\"[^\"]*\"|'[^']*')\s*:)(?:\s+(.*?))?(\s+#.*)?$")


def set_key(text: str, path: KeyPath, value: Any, *, where: str) -> str:
    """`text` with the key at `path` (one or two names) set; ConfigError when it is no valid YAML yet."""
    found, lines = parse_document(text, where=where)
    before = found if found is not None else {}
    if not isinstance(before, dict):
        raise ConfigError(f"{where}: the text is no mapping; a recipe is keys and values, e.g. 'name: my-run'")
    wanted = copy.deepcopy(before)
    inner = wanted
    for name in path[:-1]:
        if not isinstance(inner.get(name), dict):
            inner[name] = {}
        inner = inner[name]
    if path[-1] in inner and inner[path[-1]] == value and wanted == before:
        return text
    inner[path[-1]] = value
    for rows in _candidates(text.splitlines(), path, value, wanted, lines):
        candidate = "\n".join(rows) + "\n"
        with suppress(ConfigError):
            if parse_document(candidate, where=where)[0] == wanted:
                return candidate
    # The change fits nowhere in what was written, so the whole text is written anew.
    rows = []
    for key, item in wanted.items():
        if isinstance(item, dict) and item:
            rows += [
                f"{format_key(key)}:",
                *(f"  {format_key(name)}: {format_value(one)}" for name, one in item.items()),
            ]
        else:
            rows.append(f"{format_key(key)}: {format_value(item)}")
    return "\n".join(rows) + "\n"


def _candidates(
    rows: list[str], path: KeyPath, value: Any, wanted: dict[str, Any], lines: dict[KeyPath, int]
) -> Iterator[list[str]]:
    """Ways to write the change, the least intrusive first; each is tried by reading it back."""

    def replace(line: int, new: Any) -> list[str]:
        """The value on one line replaced, its comment kept."""
        match = _VALUE.match(rows[line - 1])
        if match is None:
            return rows
        return [*rows[: line - 1], f"{match[1]} {format_value(new)}{match[3] or ''}", *rows[line:]]

    entry = f"{format_key(path[-1])}: {format_value(value)}"
    if path in lines:
        yield replace(lines[path], value)
    if len(path) == 1:
        first = min((line for key, line in lines.items() if len(key) == 1), default=len(rows) + 1)
        yield [*rows[: first - 1], entry, *rows[first - 1 :]]
    elif (section := lines.get(path[:1])) is not None:
        below = [line for key, line in lines.items() if len(key) == 2 and key[0] == path[0]]
        child = rows[min(below) - 1] if below else "  "
        indent = child[: len(child) - len(child.lstrip())] or "  "
        yield [*rows[:section], f"{indent}{entry}", *rows[section:]]
        yield replace(section, wanted[path[0]])
    else:
        yield [*rows, f"{path[0]}:", f"  {entry}"]
