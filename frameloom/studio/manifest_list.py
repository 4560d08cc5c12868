"""Which files below the root are manifests, told by their columns."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl

from frameloom.data.sources.columns import ALIASES, PATH_NAMES
from frameloom.studio.context import StudioContext

SUFFIXES = (".parquet", ".csv", ".jsonl")
_CAPTIONS = {"caption", "captions", *ALIASES["caption"]}
_MAX_LISTED = 500
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
