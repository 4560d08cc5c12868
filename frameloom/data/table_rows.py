"""Rows of a table in memory, sent to worker processes without copies where they are many."""

from __future__ import annotations

import io
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import polars as pl
import pyarrow as pa

# Larger tables travel to worker processes as a memory-mapped file that all of them share.
INLINE_BYTES = 32 * 2**20
_LISTED_ROWS = 2**17


class Rows(Protocol):
    """Where the rows of one source are: in memory, or with their text on disk."""

    @property
    def columns(self) -> list[str]: ...

    def __len__(self) -> int: ...

    def values(self, names: Sequence[str], row: int) -> tuple[Any, ...]: ...

    def gather(self, name: str, rows: Sequence[int]) -> list[Any]: ...

    def slice(self, name: str, start: int, count: int) -> pl.Series: ...

    @property
    def known_fingerprint(self) -> str | None:
        """The fingerprint, if it was worked out when the rows were written."""
        ...


class TableRows:
    """A table in memory."""

    known_fingerprint: str | None = None

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
        # Column by column: a frame of one row costs thirty times as much, and training asks for every sample.
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
        return {"spill": str(self._spill_file())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        inline = state.get("inline")
        self._table = pl.read_ipc(inline) if inline is not None else _map_table(Path(state["spill"]))
        self._spill = None
        self._columns = {}

    def _spill_file(self) -> Path:
        if self._spill is None:
            descriptor, name = tempfile.mkstemp(prefix="frameloom-manifest-", suffix=".arrow")
            os.close(descriptor)
            self._spill = Path(name)
            weakref.finalize(self, self._spill.unlink, missing_ok=True)
            self._table.write_ipc(self._spill)
        return self._spill


def _map_table(path: Path) -> pl.DataFrame:
    """The table on top of the file's pages, without a copy (polars' own reader makes one)."""
    with pa.memory_map(str(path)) as source:
        table = pl.from_arrow(pa.ipc.open_file(source).read_all())
    assert isinstance(table, pl.DataFrame)
    return table
