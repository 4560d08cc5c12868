"""New captions go into a new manifest beside the old one; no manifest is ever changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from frameloom.core.errors import DataError
from frameloom.core.files import atomic_file
from frameloom.core.paths import clean_name
from frameloom.data.sources.columns import REQUIRED
from frameloom.data.table_check import check_table
from frameloom.studio.clip_table import ClipTable

MAX_EDITS = 10_000
MAX_CHARS = 10_000


def check_caption(text: str) -> str:
    caption = text.strip()
    if len(caption) > MAX_CHARS:
        raise DataError(f"the caption has {len(caption):,} characters; at most {MAX_CHARS:,} are kept, shorten it")
    return caption


def free_name(path: Path) -> str:
    """A name for the next manifest beside `path` that is not taken yet."""
    stem = clean_name(path.stem)
    number = 1
    while (path.parent / f"{stem}-edited-{number}.parquet").exists():
        number += 1
    return f"{stem}-edited-{number}.parquet"


def write_edited(table: ClipTable, edits: Mapping[int, str], name: str) -> Path:
    """Write the manifest with the new captions to `name` beside the old one; refused when that exists."""
    if not edits:
        raise DataError(f"{table.path.name}: no caption was changed; edit one first")
    stem = name.strip().removesuffix(".parquet")
    target = table.path.parent / f"{stem}.parquet"
    if not stem or Path(stem).name != stem or stem.startswith(".") or "\0" in stem or len(target.name.encode()) > 200:
        raise DataError(f"{name!r}: not a plain file name; e.g. {free_name(table.path)}")
    if target.exists():
        raise DataError(f"{target.name}: exists already and is never overwritten; e.g. {free_name(table.path)}")
    edited = apply_edits(table.table, edits)
    is_complete = not any(edited[column].null_count() for column in REQUIRED if column != "fps")
    with atomic_file(target) as temporary:
        (check_table(edited, source=target.name) if is_complete else edited).write_parquet(temporary)
    return target


def apply_edits(table: pl.DataFrame, edits: Mapping[int, str]) -> pl.DataFrame:
    """The table with other captions in some rows; a row's list of captions gives way to the edited one."""
    rows = list(edits)
    captions = table["caption"].clone().scatter(rows, [edits[row] for row in rows])
    table = table.with_columns(captions)
    if "captions" in table.columns:
        is_edited = pl.Series("edited", [False] * table.height).scatter(rows, True)
        table = table.with_columns(captions=pl.when(is_edited).then(None).otherwise(pl.col("captions")))
    return table
