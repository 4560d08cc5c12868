"""Lists of the recipes and manifests below a folder, and edits of one key in the text of a recipe."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
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


_VALUE = r"^(\s*(?:[\w.-]+|\"[^\"]*\"|'[^']*')\s*:)(?:\s+(.*?))?(\s+#.*)?$"


def set_key(text: str, path: KeyPath, value: Any, *, where: str) -> str:
    """`text` with the key at `path` (one or two names) set; ConfigError when it is no valid YAML yet."""
    found, lines = parse_document(text, where=where)
    before = found if found is not None else {}
    if not isinstance(before, dict):
        raise ConfigError(f"{where}: the text is no mapping; a recipe is keys and values, e.g. 'name: my-run'")
    wanted = _with_key(before, path, value)
    if wanted == before and _has(before, path):
        return text
    for candidate in _candidates(text, path, value, wanted, lines):
        if _reads_as(candidate, wanted, where):
            return candidate
    return _render(wanted)


def _with_key(tree: dict[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(tree)
    inner = changed
    for name in path[:-1]:
        if not isinstance(inner.get(name), dict):
            inner[name] = {}
        inner = inner[name]
    inner[path[-1]] = value
    return changed


def _has(tree: Any, path: KeyPath) -> bool:
    for name in path:
        if not isinstance(tree, dict) or name not in tree:
            return False
        tree = tree[name]
    return True


def _reads_as(text: str, wanted: dict[str, Any], where: str) -> bool:
    try:
        return bool(parse_document(text, where=where)[0] == wanted)
    except ConfigError:
        return False


def _candidates(
    text: str, path: KeyPath, value: Any, wanted: dict[str, Any], lines: dict[KeyPath, int]
) -> Iterator[str]:
    """Ways to write the change, the least intrusive first; each is tried by reading it back."""
    rows = text.splitlines()
    if path in lines:
        yield _join(_replace(rows, lines[path], value))
    section = path[:1]
    if len(path) == 2 and section in lines:
        yield _join(_insert(rows, lines[section], _child_indent(rows, lines, path), path[1], value))
        yield _join(_replace(rows, lines[section], wanted[path[0]]))
    elif len(path) == 2:
        block = [f"{path[0]}:", f"  {format_key(path[1])}: {format_value(value)}"]
        yield _join([*rows, *block])
    else:
        first = min((line for key, line in lines.items() if len(key) == 1), default=len(rows) + 1)
        yield _join([*rows[: first - 1], f"{format_key(path[0])}: {format_value(value)}", *rows[first - 1 :]])


def _replace(rows: list[str], line: int, value: Any) -> list[str]:
    """The value on one line replaced, its comment kept."""
    found = re.match(_VALUE, rows[line - 1])
    if found is None:
        return rows
    return [*rows[: line - 1], f"{found[1]} {format_value(value)}{found[3] or ''}", *rows[line:]]


def _insert(rows: list[str], line: int, indent: str, key: str, value: Any) -> list[str]:
    return [*rows[:line], f"{indent}{format_key(key)}: {format_value(value)}", *rows[line:]]


def _child_indent(rows: list[str], lines: dict[KeyPath, int], path: KeyPath) -> str:
    below = [line for key, line in lines.items() if len(key) == 2 and key[0] == path[0]]
    row = rows[min(below) - 1] if below else "  "
    return row[: len(row) - len(row.lstrip())] or "  "


def _join(rows: list[str]) -> str:
    return "\n".join(rows) + "\n"


def _render(tree: dict[str, Any]) -> str:
    """The whole text anew: only when the change fits nowhere in what was written."""
    rows = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            rows.append(f"{format_key(key)}:")
            rows += [f"  {format_key(name)}: {format_value(item)}" for name, item in value.items()]
        else:
            rows.append(f"{format_key(key)}: {format_value(value)}")
    return _join(rows)
