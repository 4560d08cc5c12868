"""One parquet file, or a folder of them that stands for one table.

Two kinds of folders: shards that hold every column (ours, with `shards.json`, and any others), and Open-Sora's, whose
shards lack the sizes, which the table beside the folder has: `clips.parquet` and `clips/00001.parquet` and so on.
Shards are ordered by the numbers in their names, and there may be any number of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from frameloom.core.errors import DataError
from frameloom.core.files import PARTIAL
from frameloom.data.manifest.sources.columns import ALIASES, NUMBER_NAMES
from frameloom.data.manifest.sources.media_files import find_tars, has_media
from frameloom.data.manifest.sources.text_tables import find_csv

_SCANNED = ("codec", "rotation", "vfr", "bytes")
INDEX_NAME = "shards.json"
INDEX_FORMAT = "frameloom table shards 1"


@dataclass(frozen=True)
class ShardFiles:
    """The files of a sharded table in the order of its rows. `main` holds the sizes where the shards do not."""

    files: tuple[Path, ...]
    rows: tuple[int, ...]
    root: Path
    main: Path | None = None
    digests: tuple[str, ...] = ()
    fingerprint: str | None = None

    @property
    def num_rows(self) -> int:
        return sum(self.rows)


def read_parquet(path: Path) -> pl.DataFrame:
    try:
        return pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path}: not a readable parquet table ({error}); write it again as parquet") from error


def read_shards(shards: ShardFiles) -> pl.DataFrame:
    """All columns of a sharded table in memory."""
    tables = [read_parquet(file) for file in shards.files]
    try:
        table = pl.concat(tables, how="diagonal_relaxed", rechunk=True)
    except pl.exceptions.PolarsError as error:
        raise DataError(
            f"{shards.files[0].parent}: the shards' columns differ in type ({error}); write them alike"
        ) from error
    if shards.main is None:
        return table
    main = read_parquet(shards.main)
    return pl.concat([main, table.drop(set(main.columns) & set(table.columns))], how="horizontal")


def find_shards(path: Path) -> ShardFiles | None:
    """The sharded table at `path`: a folder of shards, or Open-Sora's main table; None if it is neither."""
    if path.is_dir():
        return _open_folder(path)
    folder = path.with_suffix("")
    if folder == path or not folder.is_dir() or not _parquet_files(folder) or not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(4) != b"PAR1":
            return None
    if set(_read_footer(path)[0]) & {"caption", *ALIASES["caption"]}:
        return None  # the table is whole without its shards
    return _with_main(path, folder)


def _open_folder(folder: Path) -> ShardFiles | None:
    if (folder / INDEX_NAME).is_file():
        return _read_index(folder)
    files = _parquet_files(folder)
    others = [file for file in files if not _is_result(file)]
    # Manifests that were made of the clips in a folder, and lie among them, are no source of the next scan.
    if len(others) < len(files) and (has_media(folder) or find_csv(folder) or find_tars(folder)):
        files = others
    if not files:
        return None
    main = folder.parent / f"{folder.name}.parquet"
    if main.is_file() and not set(_read_footer(files[0])[0]) & set(NUMBER_NAMES):
        return _with_main(main, folder)
    # Numbered shards belong to a table beside their folder; paths in other files start from the folder itself.
    numbered = all(file.stem.isdecimal() for file in files)
    return ShardFiles(
        tuple(files), tuple(_read_footer(file)[1] for file in files), folder.parent if numbered else folder
    )


def _is_result(file: Path) -> bool:
    """Whether a scan or a check has written it: a manifest with what a scan adds, or a list of broken files."""
    manifest = file.parent / file.name.replace(".errors.", ".").replace(".reasons.", ".")
    has_progress = any(manifest.with_suffix(suffix).is_dir() for suffix in (".scan", ".check"))
    return has_progress or set(_SCANNED) <= set(_read_footer(file)[0])


def _with_main(main: Path, folder: Path) -> ShardFiles:
    files = _parquet_files(folder)
    shards = ShardFiles(tuple(files), tuple(_read_footer(file)[1] for file in files), main.parent, main=main)
    total = _read_footer(main)[1]
    if shards.num_rows != total:
        raise DataError(
            f"{folder}: its shards have {shards.num_rows} rows together, but {main} has {total}; "
            "a shard is missing or left over: cut the table again"
        )
    start = 0
    for file, count in zip(shards.files, shards.rows, strict=True):
        if file in (files[0], files[-1]):
            _check_same_paths(main, file, start, count)
        start += count
    return shards


def _check_same_paths(main: Path, shard: Path, start: int, count: int) -> None:
    """Rows are joined by their order alone, so a shard out of order would give clips the captions of others."""
    if "path" not in _read_footer(shard)[0]:
        return
    here = pl.read_parquet(shard, columns=["path"])["path"]
    there = pl.scan_parquet(main).select("path").slice(start, count).collect()["path"]
    if not here.equals(there, check_dtypes=False, check_names=False):
        raise DataError(
            f"{shard}: its paths are not those of rows {start} to {start + count - 1} of {main}; cut it again"
        )


def _read_index(folder: Path) -> ShardFiles:
    path = folder / INDEX_NAME
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if index["format"] != INDEX_FORMAT:
            raise DataError(f"{path}: format {index['format']!r} is not known; this version reads '{INDEX_FORMAT}'")
        entries = index["shards"]
        names = [str(entry["file"]) for entry in entries]
        rows = tuple(int(entry["rows"]) for entry in entries)
        sizes = [int(entry["bytes"]) for entry in entries]
        digests = tuple(str(entry["sha256"]) for entry in entries)
        fingerprint = str(index["fingerprint"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: damaged ({error!r}); cut the table again with: frameloom data shard") from error
    for name, size in zip(names, sizes, strict=True):
        file = folder / name
        if not re.fullmatch(r"[0-9]+\.parquet", name) or not file.is_file() or file.stat().st_size != size:
            raise DataError(f"{file}: missing, or not the {size} bytes of {path}; cut the table again")
    files = tuple(folder / name for name in names)
    return ShardFiles(files, rows, folder.parent, digests=digests, fingerprint=fingerprint)


def _parquet_files(folder: Path) -> list[Path]:
    found = [file for file in folder.glob("*.parquet") if file.is_file() and not file.name.startswith(PARTIAL)]
    # Text and numbers in turn, so that 100000 comes behind 99999.
    parts = {file: re.split(r"([0-9]+)", file.name) for file in found}
    return sorted(found, key=lambda file: [int(part) if part.isdecimal() else part for part in parts[file]])


def _read_footer(path: Path) -> tuple[list[str], int]:
    """(names of the columns, number of rows)."""
    try:
        metadata = pq.read_metadata(path)
        return metadata.schema.to_arrow_schema().names, int(metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet table ({error}); write it again as parquet") from error
