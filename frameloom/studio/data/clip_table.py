"""Table of the clips of a manifest: filters, pages, and edited captions written to a new manifest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from frameloom.core.errors import DataError
from frameloom.core.files import atomic_file
from frameloom.core.paths import clean_name
from frameloom.data.curation.scan import fold_members
from frameloom.data.manifest.filters import parse_filter
from frameloom.data.manifest.rows import check_table
from frameloom.data.manifest.sources.columns import REQUIRED
from frameloom.data.manifest.sources.reading import Source

PAGE_ROWS = 24
_MAX_FILTERS = 8


@dataclass(frozen=True)
class ClipFilter:
    """Which rows are shown. `side` is the shorter side in pixels; None stands for no bound."""

    text: str = ""
    kind: str = "all"
    frames: tuple[float | None, float | None] = (None, None)
    side: tuple[float | None, float | None] = (None, None)
    fps: tuple[float | None, float | None] = (None, None)
    where: str = ""

    def expressions(self, schema: pl.Schema, source: str) -> list[pl.Expr]:
        found = []
        if words := self.text.strip().lower():
            has_words = [
                pl.col(name).str.to_lowercase().str.contains(words, literal=True) for name in ("caption", "path")
            ]
            found.append(pl.any_horizontal(has_words))
        if self.kind != "all":
            found.append(pl.col("kind") == self.kind)
        sides = pl.min_horizontal("height", "width")
        for column, bounds in ((pl.col("frames"), self.frames), (sides, self.side), (pl.col("fps"), self.fps)):
            low, high = bounds
            found += [column >= low] if low is not None else []
            found += [column <= high] if high is not None else []
        if self.where.strip():
            found.append(parse_filter(self.where, schema, source=source))
        return found


@dataclass(frozen=True)
class Page:
    """One page of the rows that a filter keeps; `rows` has their numbers in a column of that name."""

    rows: pl.DataFrame
    number: int
    num_rows: int


@dataclass
class ClipTable:
    """An open manifest."""

    path: Path
    source: Source
    key: str
    _found: OrderedDict[ClipFilter, NDArray[np.uint32]] = field(default_factory=OrderedDict)

    @cached_property
    def table(self) -> pl.DataFrame:
        return self.source.table

    def page(self, wanted: ClipFilter, number: int) -> Page:
        """The page `number` from 0, or the nearest that exists."""
        rows = self.find(wanted)
        last = max(0, (len(rows) - 1) // PAGE_ROWS)
        number = min(max(number, 0), last)
        shown = rows[number * PAGE_ROWS : (number + 1) * PAGE_ROWS]
        return Page(self.table[shown].with_columns(row=pl.Series(shown)), number, len(rows))

    def find(self, wanted: ClipFilter) -> NDArray[np.uint32]:
        """The numbers of the rows that a filter keeps, in order; cached for paging."""
        if wanted not in self._found:
            lazy = self.table.lazy().with_row_index("__row")
            for expression in wanted.expressions(self.table.schema, self.path.name):
                lazy = lazy.filter(expression)
            self._found[wanted] = lazy.select("__row").collect().to_series().to_numpy()
            while len(self._found) > _MAX_FILTERS:
                self._found.popitem(last=False)
        return self._found[wanted]

    def row(self, number: int) -> dict[str, Any]:
        if not 0 <= number < self.table.height:
            raise DataError(f"{self.path.name}: no row {number}; it has {self.table.height:,}")
        return self.table.row(number, named=True)

    def media_facts(self, number: int) -> dict[str, Any]:
        """The row, with the tar member that holds its file folded into one column."""
        self.row(number)
        return fold_members(self.table.slice(number, 1)).row(0, named=True)


MAX_EDITS = 10_000


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
