"""The rows that a run was started with, kept in its folder, so that a changed manifest can be told row by row."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from frameloom.core.files import atomic_file
from frameloom.data.manifest import REQUIRED, TRAINED_ON, Manifest

__all__ = ["MAX_ROWS", "describe_changes", "write_rows"]

# A larger manifest is not copied: its own size is what it would cost each run.
MAX_ROWS = 2_000_000
_NUM_SHOWN = 5
_KEY = ("path", "occurrence")


def write_rows(path: Path, manifest: Manifest) -> None:
    """Put down what decides the training: one line a row, in order."""
    if len(manifest) > MAX_ROWS:
        path.unlink(missing_ok=True)
        return
    with atomic_file(path) as temporary:
        _take_table(manifest).write_parquet(temporary)


def describe_changes(path: Path, manifest: Manifest) -> str:
    """What became of the rows since `write_rows`, in words."""
    try:
        kept = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError):
        return f"it has {len(manifest):,} rows now; which ones changed is not known, the run has no copy of them"
    before, after = (_number(table) for table in (kept, _take_table(manifest)))
    removed = before.join(after, on=_KEY, how="anti")["path"].to_list()
    added = after.join(before, on=_KEY, how="anti")["path"].to_list()
    found = [
        f"{len(paths):,} {what} ({_show(paths)})" for what, paths in (("removed", removed), ("added", added)) if paths
    ]
    if edited := _find_edited(before, after):
        found.append(f"{len(edited):,} edited ({_show(edited)})")
    if not found:
        found = ["the rows are in another order"]
    return ", ".join(found)


def _find_edited(before: pl.DataFrame, after: pl.DataFrame) -> list[str]:
    """Paths of rows that are in both and differ, with the columns that do."""
    columns = [name for name in after.columns if name not in (*_KEY, "row")]
    both = after.join(before, on=_KEY, how="inner", suffix=" before", maintain_order="left")
    differs = {name: both[name].ne_missing(both[f"{name} before"]) for name in columns}
    is_edited = pl.Series([False] * len(both), dtype=pl.Boolean)
    for column in differs.values():
        is_edited = is_edited | column
    return [
        f"{both['path'][row]}: {', '.join(name for name in columns if differs[name][row])}"
        for row in is_edited.arg_true().to_list()
    ]


def _take_table(manifest: Manifest) -> pl.DataFrame:
    """All columns that matter, as texts; one that the manifest lacks is null."""
    table = pl.DataFrame({name: _to_text(manifest.column(name)) for name in REQUIRED})
    more = [name for name in TRAINED_ON if name in manifest.columns]
    table = table.with_columns(_to_text(manifest.column(name)).alias(name) for name in more)
    return table.with_columns(pl.lit(None, dtype=pl.String).alias(name) for name in TRAINED_ON if name not in more)


def _to_text(column: pl.Series) -> pl.Series:
    return column.list.join("\n") if isinstance(column.dtype, pl.List) else column.cast(pl.String)


def _number(table: pl.DataFrame) -> pl.DataFrame:
    """One file may have several rows; they are told apart by their order."""
    return table.with_columns(occurrence=pl.int_range(pl.len()).over("path"))


def _show(texts: list[str]) -> str:
    more = f" and {len(texts) - _NUM_SHOWN:,} more" if len(texts) > _NUM_SHOWN else ""
    return "; ".join(texts[:_NUM_SHOWN]) + more
