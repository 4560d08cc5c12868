"""Manifests cut into parquet shards: sizes in memory, paths and captions on disk until their row is read.

    clips/
      00001.parquet ...   every column; small row groups, so that one row costs little to read
      shards.json         format, rows, fingerprint of the whole table, and the digest of each shard

A shard's digest is checked when it is first opened for its text. Shards written by other tools, and Open-Sora's layout
with the sizes in a separate table, are validated as a whole when opened.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from frameloom.core.errors import DataError
from frameloom.core.files import atomic_folder, digest_file, write_json
from frameloom.data.manifest.filters import Condition, Where, no_rows, parse_where
from frameloom.data.manifest.rows import Rows, TableRows, check_table, refuse_incomplete
from frameloom.data.manifest.sources.columns import COUNTS, KINDS, to_our_columns
from frameloom.data.manifest.sources.parquet_tables import INDEX_FORMAT, INDEX_NAME, ShardFiles, read_parquet

GEOMETRY = ("kind", "height", "width", "frames", "fps")
_ROWS_PER_GROUP = 512
_MAX_FILES, _MAX_GROUPS = 64, 64
_KIND = pl.Enum(KINDS)


def write_shards(table: pl.DataFrame, out: Path, *, rows: int, fingerprint: str) -> int:
    """Cut a checked table into shards of `rows` rows, all of them or none; how many there are."""
    if out.exists():
        raise DataError(f"{out}: exists already; name a new folder")
    entries = []
    with atomic_folder(out) as folder:
        for number, start in enumerate(range(0, table.height, rows), 1):
            file = folder / f"{number:05d}.parquet"
            part = table.slice(start, rows)
            part.write_parquet(file, row_group_size=_ROWS_PER_GROUP)
            facts = {"file": file.name, "rows": part.height, "bytes": file.stat().st_size, "sha256": digest_file(file)}
            entries.append(facts)
        index = {"format": INDEX_FORMAT, "rows": table.height, "fingerprint": fingerprint, "shards": entries}
        write_json(folder / INDEX_NAME, index)
    return len(entries)


class ShardRows(Rows):
    """Rows of a sharded table: `kept` are the rows on disk that a filter left, in order."""

    def __init__(
        self, shards: ShardFiles, geometry: pl.DataFrame, kept: NDArray[np.int64] | None, names: list[str], root: Path
    ) -> None:
        self._shards = shards
        self._geometry = TableRows(geometry)
        self._kept = kept
        self._names = names
        self._root = root
        self._starts = np.concatenate([[0], np.cumsum(shards.rows)]).astype(np.int64)
        self.known_fingerprint = shards.fingerprint if kept is None else None
        self._forget()

    def _forget(self) -> None:
        self._files: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], pl.DataFrame] = OrderedDict()
        self._verified: set[int] = set()

    @property
    def columns(self) -> list[str]:
        return self._names

    def __len__(self) -> int:
        return len(self._geometry)

    def values(self, names: Sequence[str], row: int) -> tuple[Any, ...]:
        sizes = [name for name in names if name in GEOMETRY]
        found = dict(zip(sizes, self._geometry.values(sizes, row), strict=True)) if sizes else {}
        if len(sizes) < len(names):
            text = [name for name in names if name not in GEOMETRY]
            table, local = self._group_of(int(self._kept[row]) if self._kept is not None else row, text)
            found |= zip(text, table.select(text).row(local), strict=True)
        return tuple(found[name] for name in names)

    def slice(self, name: str, start: int, count: int) -> pl.Series:
        """A stretch of a column; one that is on disk is read shard by shard."""
        stop = min(start + count, len(self))
        if name in GEOMETRY:
            column = self._geometry.slice(name, start, stop - start)
            return column.cast(pl.String) if name == "kind" else column
        wanted = self._kept[start:stop] if self._kept is not None else np.arange(start, stop, dtype=np.int64)
        parts = []
        for shard in np.unique(np.searchsorted(self._starts, wanted, side="right") - 1).tolist():
            low, high = np.searchsorted(wanted, self._starts[shard : shard + 2])
            self._verify(shard)
            column = _read_shard(self._shards, shard, self._root, [name])[name]
            parts.append(column.gather(wanted[low:high] - self._starts[shard]))
        return pl.concat(parts) if parts else pl.Series(name, [], dtype=pl.String)

    def _group_of(self, disk_row: int, names: list[str]) -> tuple[pl.DataFrame, int]:
        """(the row group that holds a row, the row's place in it); the last few groups stay in memory."""
        shard = int(np.searchsorted(self._starts, disk_row, side="right")) - 1
        file = self._open(shard)
        local, group = disk_row - int(self._starts[shard]), 0
        while local >= file.metadata.row_group(group).num_rows:
            local -= file.metadata.row_group(group).num_rows
            group += 1
        key = (shard, group)
        held = self._groups.get(key)
        if held is None or not set(names) <= set(held.columns):
            # A clip's path and caption are nearly always read one after the other.
            wanted = sorted({"path", "caption", *names}) if self._shards.digests else None
            table: Any = pl.from_arrow(file.read_row_group(group, columns=wanted, use_threads=False))
            if not self._shards.digests:
                table = _to_ours(table, self._shards, shard, disk_row - local, self._root)
            self._groups[key] = table
            if len(self._groups) > _MAX_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key], local

    def _open(self, shard: int) -> pq.ParquetFile:
        if shard not in self._files:
            self._verify(shard)
            try:
                self._files[shard] = pq.ParquetFile(self._shards.files[shard], memory_map=True)
            except (pa.ArrowException, OSError) as error:
                raise DataError(
                    f"{self._shards.files[shard]}: cannot be read ({error}); cut the table again"
                ) from error
            if len(self._files) > _MAX_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(shard)
        return self._files[shard]

    def _verify(self, shard: int) -> None:
        """Once per process and shard; a changed caption would otherwise be trained on unnoticed."""
        if self._shards.digests and shard not in self._verified:
            file = self._shards.files[shard]
            if not file.is_file() or digest_file(file) != self._shards.digests[shard]:
                raise DataError(f"{file}: its content is not what {INDEX_NAME} says; cut the table again")
            self._verified.add(shard)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_files", "_groups", "_verified"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def open_shards(shards: ShardFiles, *, root: Path, filters: Sequence[Where], source: str) -> ShardRows:
    """The rows that fulfil all filters, with their sizes in memory."""
    geometry: list[pl.DataFrame] = []
    kept: list[NDArray[np.int64]] = []
    names, conditions, columns = [], [], None
    if shards.digests:
        # What `data shard` wrote was checked then; only the columns that are needed are read.
        schema = pl.read_parquet_schema(shards.files[0])
        names, conditions = list(schema), _parse_all(filters, schema, source)
        used = {name for condition in conditions for name in condition.expression.meta.root_names()}
        columns = [*GEOMETRY, *sorted(used - set(GEOMETRY))]
    num_left = [0] * len(conditions)
    start = 0
    for shard, file in enumerate(shards.files):
        table = _read_shard(shards, shard, root, columns)
        if not shard and columns is None:
            names, conditions = table.columns, _parse_all(filters, table.schema, source)
            num_left = [0] * len(conditions)
        table = table.with_columns(pl.int_range(start, start + table.height, dtype=pl.Int64).alias("__row"))
        for number, condition in enumerate(conditions):
            table = table.filter(condition.expression)
            num_left[number] += table.height
        if table.height and columns is None:
            rows_on_disk = (table["__row"] - start).to_list()
            refuse_incomplete(table, source=str(file), locate=partial(_locate_on_disk, rows_on_disk))
            table = check_table(table, source=str(file), locate=partial(_locate_on_disk, rows_on_disk))
        kept.append(table["__row"].to_numpy())
        sizes = [pl.col(COUNTS).cast(pl.Int32), pl.col("fps").cast(pl.Float64)]
        geometry.append(table.select(pl.col("kind").cast(_KIND), *sizes))
        start += shards.rows[shard]
    for number, condition in enumerate(conditions):
        if not num_left[number]:
            raise no_rows(condition, source)
    rows = np.concatenate(kept) if conditions else None
    return ShardRows(shards, pl.concat(geometry, rechunk=True), rows, names, root)


def _locate_on_disk(rows: list[int], row: int) -> str:
    return f"row {rows[row]}"


def _parse_all(filters: Sequence[Where], schema: Mapping[str, pl.DataType], source: str) -> list[Condition]:
    return [condition for where in filters for condition in parse_where(where, schema, source=source)]


def _read_shard(shards: ShardFiles, shard: int, root: Path, columns: list[str] | None) -> pl.DataFrame:
    """One shard; all of it, with our columns, if another tool wrote it."""
    file = shards.files[shard]
    if not shards.digests:
        return _to_ours(read_parquet(file), shards, shard, sum(shards.rows[:shard]), root)
    try:
        return pl.read_parquet(file, columns=columns)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{file}: not a readable shard ({error}); cut the table again") from error


def _to_ours(table: pl.DataFrame, shards: ShardFiles, shard: int, start: int, root: Path) -> pl.DataFrame:
    """Rows of a foreign shard from `start` on, joined with the sizes of the main table where there is one."""
    if shards.main is not None:
        main = pl.scan_parquet(shards.main).slice(start, table.height).collect()
        table = pl.concat([main, table.drop(set(main.columns) & set(table.columns))], how="horizontal")
    return to_our_columns(table, root=root, source=str(shards.files[shard]))
