"""The manifest: one parquet row per clip or image, checked as a whole before anything is opened.

Columns are `path` (relative to the root), `caption`, `kind` ("video" or "image"), `height`, `width`, `frames`,
`fps` (null for images) and any others. Rows stay in columns, so ten million of them cost no Python objects;
a path, a caption and the facts of one clip are fetched when its row is read.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from frameloom.core.errors import DataError
from frameloom.core.files import atomic_file
from frameloom.core.paths import safe_join

REQUIRED = ("path", "caption", "kind", "height", "width", "frames", "fps")
KINDS = ("video", "image")
_TEXT = ("path", "caption", "kind")
_COUNTS = ("height", "width", "frames")
_MAX_COUNT = 2**31 - 1
_SCHEME = r"^[A-Za-z][A-Za-z0-9+.-]+:"
_UPWARD = r"(^|[/\\])\.\.([/\\]|$)"
# Larger tables travel to worker processes as a memory-mapped file that all of them share.
_INLINE_BYTES = 32 * 2**20
_HASH_ROWS = 1_000_000


class ClipRow(NamedTuple):
    """What the manifest says about one clip; `fps` is None for an image."""

    row: int
    path: str
    caption: str
    kind: str
    height: int
    width: int
    frames: int
    fps: float | None


class Manifest:
    """A checked table of clips below `root`. Make one with `read`."""

    def __init__(self, table: pl.DataFrame, root: Path, source: str) -> None:
        self._table = table
        self._spill: Path | None = None
        self.root = root
        self.source = source

    @classmethod
    def read(cls, path: Path, *, root: Path | None = None, where: Mapping[str, Any] | None = None) -> Self:
        """Read and check the whole table; `where` keeps rows whose columns have the given value (or one of a list)."""
        table = check_table(_read_parquet(path), source=str(path))
        table = _filter(table, where or {}, source=str(path))
        return cls(table, root if root is not None else path.parent, str(path))

    def __len__(self) -> int:
        return self._table.height

    @property
    def columns(self) -> list[str]:
        return self._table.columns

    def column(self, name: str) -> pl.Series:
        """Any column, also one beyond the required ones."""
        if name not in self._table.columns:
            raise DataError(f"{self.source}: no column '{name}'; {_near(name, self._table.columns)}")
        return self._table[name]

    @cached_property
    def height(self) -> NDArray[np.int32]:
        return self._table["height"].to_numpy()

    @cached_property
    def width(self) -> NDArray[np.int32]:
        return self._table["width"].to_numpy()

    @cached_property
    def frames(self) -> NDArray[np.int32]:
        return self._table["frames"].to_numpy()

    @cached_property
    def fps(self) -> NDArray[np.float64]:
        """Frames per second; NaN for images."""
        return self._table["fps"].fill_null(float("nan")).to_numpy()

    def clip(self, row: int) -> ClipRow:
        """The facts of one row."""
        return ClipRow(row, *self._table.select(REQUIRED).row(row))

    def caption(self, row: int) -> str:
        return str(self._table["caption"][row])

    def captions(self, rows: Sequence[int] | NDArray[np.int64]) -> list[str]:
        return [self.caption(int(row)) for row in rows]

    def file(self, row: int) -> Path:
        """Where the file of a row is; refused when a symbolic link leads out of the root."""
        return safe_join(self.root, str(self._table["path"][row]), where=f"{self.source}: row {row}")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides what is trained on: file names, captions, shapes, content hashes, order."""
        names = [*REQUIRED, *(["sha256"] if "sha256" in self._table.columns else [])]
        digest = hashlib.sha256(f"frameloom manifest 1, {len(self)} rows".encode())
        for name in names:
            digest.update(f"/{name}/".encode())
            for start in range(0, len(self), _HASH_ROWS):
                _hash_column(digest, self._table[name].slice(start, _HASH_ROWS))
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {"root": self.root, "source": self.source}
        if self._table.estimated_size() <= _INLINE_BYTES:
            buffer = io.BytesIO()
            self._table.write_ipc(buffer)
            return state | {"inline": buffer.getvalue()}
        return state | {"spill": str(self._spill_file())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        inline = state.get("inline")
        self._table = pl.read_ipc(inline) if inline is not None else _map_table(Path(state["spill"]))
        self._spill = None
        self.root = state["root"]
        self.source = state["source"]

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


def write_manifest(path: Path, table: pl.DataFrame) -> None:
    """Check `table` and write it as a manifest, complete or not at all."""
    checked = check_table(table, source=str(path))
    with atomic_file(path) as temporary:
        checked.write_parquet(temporary)


def check_table(table: pl.DataFrame, *, source: str) -> pl.DataFrame:
    """The table with exact column types; DataError names the first wrong row and column."""
    missing = [name for name in REQUIRED if name not in table.columns]
    if missing:
        raise DataError(
            f"{source}: no column {', '.join(map(repr, missing))} (it has: {', '.join(table.columns) or 'none'}); "
            f"a manifest needs {', '.join(REQUIRED)}; docs/getting-started.md shows how to make one"
        )
    _check_types(table, source)
    for column, wrong, rule in _rules():
        _refuse_first(table, source, column, wrong, rule)
    casts: list[pl.Expr] = [pl.col(_COUNTS).cast(pl.Int32), pl.col("fps").cast(pl.Float64)]
    return table.with_columns(casts).rechunk()


def _check_types(table: pl.DataFrame, source: str) -> None:
    for name in REQUIRED:
        dtype = table.schema[name]
        if name in _TEXT:
            right, wanted = dtype == pl.String or (not table.height and dtype == pl.Null), "text"
        elif name in _COUNTS:
            right, wanted = dtype.is_integer(), "whole numbers"
        else:
            right, wanted = dtype.is_numeric() or dtype == pl.Null, "numbers (null for images)"
        if not right:
            raise DataError(f"{source}: column '{name}' has type {dtype}; it must hold {wanted}")


def _rules() -> list[tuple[str, pl.Expr, str]]:
    """(column, rows that are wrong, what would be right)."""
    path, fps = pl.col("path"), pl.col("fps").cast(pl.Float64)
    video = pl.col("kind") == "video"
    return [
        *((name, pl.col(name).is_null(), "must not be null") for name in (*_TEXT, *_COUNTS)),
        ("path", path == "", "must name a file below the root"),
        ("path", path.str.contains("\0", literal=True), "must not hold a null byte"),
        ("path", path.str.contains(_SCHEME), "has a scheme; only plain paths below the root are opened"),
        ("path", path.str.starts_with("/") | path.str.starts_with("\\"), "is absolute; paths are relative to the root"),
        ("path", path.str.contains(_UPWARD), "leaves the root by '..'; move the file below it or choose another root"),
        ("kind", ~pl.col("kind").is_in(KINDS), "must be 'video' or 'image'"),
        *((name, ~pl.col(name).is_between(1, _MAX_COUNT), f"must be from 1 to {_MAX_COUNT}") for name in _COUNTS),
        ("frames", ~video & (pl.col("frames") != 1), "must be 1 for an image"),
        ("fps", ~video & fps.is_not_null(), "must be null for an image"),
        ("fps", video & ~(fps.is_finite() & (fps > 0)).fill_null(False), "must be a positive number for a video"),
    ]


def _refuse_first(table: pl.DataFrame, source: str, column: str, wrong: pl.Expr, rule: str) -> None:
    rows = table.lazy().select(wrong.fill_null(False).arg_true().head(1)).collect().to_series()
    if len(rows):
        row = int(rows[0])
        raise DataError(f"{source}: row {row}, column '{column}': {table[column][row]!r} {rule}")


def _read_parquet(path: Path) -> pl.DataFrame:
    if not path.is_file():
        raise DataError(f"{path}: no such file; docs/getting-started.md shows how to make a manifest")
    try:
        return pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path}: not a readable parquet table ({error}); write it again as parquet") from error


def _filter(table: pl.DataFrame, where: Mapping[str, Any], *, source: str) -> pl.DataFrame:
    for name, value in where.items():
        if name not in table.columns:
            raise DataError(f"{source}: cannot filter by '{name}'; {_near(name, table.columns)}")
        values = value if isinstance(value, list | tuple) else [value]
        table = table.filter(pl.col(name).is_in(values))
        if not table.height:
            raise DataError(f"{source}: no row has {name} = {value!r}; look at the values of that column")
    return table.rechunk()


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'?" if near else "it has: " + ", ".join(known)


def _hash_column(digest: Any, column: pl.Series) -> None:
    """Feed values, not their encoding in the file: chunks and compression must not change the fingerprint."""
    if column.dtype == pl.String:
        text = column.fill_null("")
        digest.update(text.str.len_bytes().cast(pl.Int64).to_numpy().tobytes())
        digest.update(text.str.join("").item().encode())
    elif column.dtype.is_integer():
        digest.update(column.cast(pl.Int64).to_numpy().tobytes())
    else:
        digest.update(column.cast(pl.Float64).fill_null(float("nan")).to_numpy().tobytes())
