"""What is known about files already: parquet parts in a folder, so that interrupted work goes on and done work stays.

A part is complete or absent; writers never touch a part of another writer, so shards of one scan can share a folder.
A file that was looked at twice is known by its newest record.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import polars as pl

from frameloom.core.errors import DataError
from frameloom.core.files import atomic_file, write_json

_PART_RECORDS = 4096
_PART_S = 20.0
_FACTS = "store.json"


class RecordStore:
    """Records of one kind of work (`what`) on the files below `root`. Parts are committed every few seconds."""

    def __init__(self, folder: Path, *, what: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
        self.folder = folder
        self._schema = {**schema, "noted_ns": pl.Int64()}
        self._open: list[dict[str, Any]] = []
        self._since_s = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        self._refuse_other(dict(what))

    @property
    def columns(self) -> list[str]:
        """The fields of a record that is added."""
        return [name for name in self._schema if name != "noted_ns"]

    def _refuse_other(self, what: dict[str, Any]) -> None:
        path = self.folder / _FACTS
        if not path.exists():
            if any(self.folder.iterdir()):
                raise DataError(f"{self.folder}: not empty and not ours; choose another --out")
            write_json(path, what)
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: damaged ({error}); remove {self.folder} to start afresh") from error
        if found != what:
            raise DataError(
                f"{self.folder}: holds the progress of other work\n  wanted {what}\n  found  {found}\n"
                "remove the folder to start afresh, or choose another --out"
            )

    def read(self) -> pl.DataFrame:
        """The newest record of every path; an unreadable part is told, not skipped."""
        parts = [pl.DataFrame(schema=self._schema)]
        for path in sorted(self.folder.glob("part-*.parquet")):
            try:
                parts.append(pl.read_parquet(path).select(list(self._schema)).cast(self._schema))  # type: ignore[arg-type]
            except FileNotFoundError:
                continue  # another process has just joined the parts; its joined one is there
            except (pl.exceptions.PolarsError, OSError) as error:
                raise DataError(f"{path}: damaged ({error}); remove it, its files are scanned again") from error
        table = pl.concat(parts)
        return table.sort("noted_ns").unique("path", keep="last", maintain_order=True)

    def add(self, record: Mapping[str, Any]) -> None:
        self._open.append({**record, "noted_ns": time.time_ns()})
        if len(self._open) >= _PART_RECORDS or time.monotonic() - self._since_s >= _PART_S:
            self.flush()

    def flush(self) -> None:
        if self._open:
            self._write(pl.DataFrame(self._open, schema=self._schema))
        self._open = []
        self._since_s = time.monotonic()

    def _write(self, table: pl.DataFrame) -> None:
        with atomic_file(self.folder / f"part-{time.time_ns():020d}-{uuid4().hex[:8]}.parquet") as temporary:
            table.write_parquet(temporary)

    def join(self) -> None:
        """Make one part of many; a crash on the way leaves records twice, which is harmless."""
        old = sorted(self.folder.glob("part-*.parquet"))
        if len(old) > 1:
            self._write(self.read())
            for path in old:
                path.unlink(missing_ok=True)
