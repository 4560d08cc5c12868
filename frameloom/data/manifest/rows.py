"""Rows of a table in memory, and the validation of manifest tables."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from frameloom.core.errors import DataError
from frameloom.core.files import spill
from frameloom.data.manifest.sources.columns import (
    COUNTS,
    KINDS,
    REQUIRED,
    Locate,
    has_control,
    locate_row,
    path_rules,
    refuse_first,
)

# Larger tables travel to worker processes as a memory-mapped file that all of them share.
INLINE_BYTES = 32 * 2**20
_LISTED_ROWS = 2**17


class Rows(ABC):
    """Where the rows of one source are: in memory, or with their text on disk."""

    known_fingerprint: str | None = None
    """the fingerprint, if it was computed when the rows were written"""

    @property
    @abstractmethod
    def columns(self) -> list[str]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def values(self, names: Sequence[str], row: int) -> tuple[Any, ...]: ...

    @abstractmethod
    def slice(self, name: str, start: int, count: int) -> pl.Series: ...

    def gather(self, name: str, rows: Sequence[int]) -> list[Any]:
        return [self.values([name], row)[0] for row in rows]


class TableRows(Rows):
    """A table in memory."""

    def __init__(self, table: pl.DataFrame) -> None:
        self._table = table
        self._spill: Path | None = None
        self._columns: dict[str, Any] = {}

    @property
    def columns(self) -> list[str]:
        return self._table.columns

    def __len__(self) -> int:
        return self._table.height

    def values(self, names: Sequence[str], row: int) -> tuple[Any, ...]:
        # Column by column: a frame of one row costs thirty times as much, and training does this for every sample.
        return tuple(self._table[name][row] for name in names)

    def gather(self, name: str, rows: Sequence[int]) -> list[Any]:
        # One by one: for a batch of rows that costs a tenth of polars' own gather, and a list a tenth of that.
        if name not in self._columns:
            column = self._table[name]
            self._columns[name] = column.to_list() if len(column) <= _LISTED_ROWS else column
        column = self._columns[name]
        return [column[row] for row in rows]

    def slice(self, name: str, start: int, count: int) -> pl.Series:
        return self._table[name].slice(start, count)

    def __getstate__(self) -> dict[str, Any]:
        if self._table.estimated_size() <= INLINE_BYTES:
            buffer = io.BytesIO()
            self._table.write_ipc(buffer)
            return {"inline": buffer.getvalue()}
        if self._spill is None:
            self._spill = spill(self, ".arrow", self._table.write_ipc)
        return {"spill": str(self._spill)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "inline" in state:
            table: Any = pl.read_ipc(state["inline"])
        else:
            # On top of the file's pages, without a copy (polars' own reader makes one).
            with pa.memory_map(state["spill"]) as source:
                table = pl.from_arrow(pa.ipc.open_file(source).read_all())
        self._table, self._spill, self._columns = table, None, {}


_TEXT = ("path", "caption", "kind")
_MAX_COUNT = 2**31 - 1


def refuse_incomplete(table: pl.DataFrame, *, source: str, locate: Locate = locate_row) -> None:
    """DataError when rows lack a size, with the command that fills them in."""
    lacking = {name: pl.col(name).is_null() for name in COUNTS if name in table.columns}
    lacking["fps"] = (pl.col("kind") == "video").fill_null(False) & pl.col("fps").is_null()
    found = []
    for name, wrong in lacking.items():
        rows = table.select(wrong.arg_true()).to_series()
        if len(rows):
            found.append(f"{name} is missing in {len(rows)} of {table.height} rows (first: {locate(int(rows[0]))})")
    if found:
        raise DataError(
            f"{source}: {'; '.join(found)}; fill the sizes in with: frameloom data scan {source} --out manifest.parquet"
        )


def check_table(table: pl.DataFrame, *, source: str, locate: Locate = locate_row) -> pl.DataFrame:
    """The table with exact column types; DataError names the first wrong row and column."""
    missing = [name for name in REQUIRED if name not in table.columns]
    if missing:
        raise DataError(
            f"{source}: no column {', '.join(map(repr, missing))} (it has: {', '.join(table.columns) or 'none'}); "
            f"a manifest needs {', '.join(REQUIRED)}; docs/getting-started.md shows how to make one"
        )
    for name in REQUIRED:
        dtype = table.schema[name]
        if name in _TEXT:
            right, wanted = dtype == pl.String or (not table.height and dtype == pl.Null), "text"
        elif name in COUNTS:
            right, wanted = dtype.is_integer(), "whole numbers"
        else:
            right, wanted = dtype.is_numeric() or dtype == pl.Null, "numbers (null for images)"
        if not right:
            raise DataError(f"{source}: column '{name}' has type {dtype}; it must hold {wanted}")
    refuse_captions(table.schema, source=source)
    refuse_first(table, _rules(), source, locate)
    if has_control(table):
        refuse_first(table, path_rules("control"), source, locate)
    return table.with_columns(pl.col(COUNTS).cast(pl.Int32), pl.col("fps").cast(pl.Float64)).rechunk()


def refuse_captions(schema: Mapping[str, pl.DataType], *, source: str) -> None:
    """DataError when `captions` holds anything but lists of texts.

    A text is not taken for a list of one: it is mostly a list in some spelling, and all of it would be one caption.
    """
    dtype = schema.get("captions", pl.Null())
    if dtype not in (pl.Null, pl.List(pl.String), pl.List(pl.Null)):
        raise DataError(
            f"{source}: column 'captions' has type {dtype}; it must hold a list of texts, the captions that a clip has "
            "to choose from; write lists (jsonl or parquet can), or give the column another name"
        )


def _rules() -> list[tuple[str, pl.Expr, str]]:
    """(column, rows that are wrong, what would be right)."""
    fps, caption = pl.col("fps").cast(pl.Float64), pl.col("caption")
    video = pl.col("kind") == "video"
    return [
        *path_rules(),
        ("caption", caption.is_null(), "must not be null; write a caption, or keep the others: caption is not null"),
        ("kind", pl.col("kind").is_null(), "is unknown: the file's ending is neither a video's nor an image's"),
        ("kind", ~pl.col("kind").is_in(KINDS), "must be 'video' or 'image'"),
        *((name, pl.col(name).is_null(), "must not be null") for name in COUNTS),
        *((name, ~pl.col(name).is_between(1, _MAX_COUNT), f"must be from 1 to {_MAX_COUNT}") for name in COUNTS),
        ("frames", ~video & (pl.col("frames") != 1), "must be 1 for an image"),
        ("fps", ~video & fps.is_not_null(), "must be null for an image"),
        ("fps", video & ~(fps.is_finite() & (fps > 0)).fill_null(False), "must be a positive number for a video"),
    ]
