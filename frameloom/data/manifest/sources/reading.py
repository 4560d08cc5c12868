"""Reading what people already have: any table, list, folder or tar of clips becomes one table with our columns.

| source | what it is |
|---|---|
| parquet, csv, jsonl, JSON list | a row per clip, with the columns of any of the systems we know |
| `merge_data.txt` and the like | Open-Sora-Plan's lists: media folder, embedding folders, annotation |
| a list of paths | a file a line, no captions |
| folder of csv | SDXL's `dir,text`; paths start from the folder |
| folder of parquet shards | one table, ours or Open-Sora's; results of scans among their clips are no shards |
| tar, folder of tars | webdataset; members are read in place |
| folder of media | a `.txt` beside each file is its caption |

What it is, is decided by content. Sizes that a source does not give are null; `frameloom data scan` fills them in.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from frameloom.core.errors import DataError
from frameloom.core.logging import get_logger
from frameloom.data.manifest.sources.columns import Place, row_place, to_our_columns
from frameloom.data.manifest.sources.dataset_list import read_dataset_list
from frameloom.data.manifest.sources.delimited import find_csv, read_csv, read_csv_folder, read_paths
from frameloom.data.manifest.sources.json_entries import dialect, read_json, read_jsonl
from frameloom.data.manifest.sources.media_folder import has_media, read_media_folder
from frameloom.data.manifest.sources.parquet_tables import find_shards, read_parquet, read_shards
from frameloom.data.manifest.sources.sniff import sniff_file
from frameloom.data.manifest.sources.tar_shards import find_tars, read_tars

__all__ = ["Source", "read_source"]


_log = get_logger(__name__)


@dataclass(frozen=True)
class Source:
    """A table of clips whose paths are relative to `root`; `starts` says which file each stretch of rows is from."""

    table: pl.DataFrame
    root: Path
    format: str
    starts: list[tuple[int, str]] = field(default_factory=list)

    def place(self, row: int) -> str:
        """Where a row stands, in words; rows count from 0 within their file."""
        return place_in(self.starts, row)


def place_in(starts: list[tuple[int, str]], row: int) -> str:
    if not starts:
        return row_place(row)
    start, name = starts[bisect_right([start for start, _ in starts], row) - 1]
    return f"{name} row {row - start}"


def read_source(path: Path, *, root: Path | None = None) -> Source:
    """The clips of any source. `root` is the folder that its paths start from; null: the one that goes with it."""
    if path.is_dir():
        return _read_folder(path, root)
    if not path.is_file():
        raise DataError(f"{path}: no such file; docs/getting-started.md shows how to make a manifest")
    shards = find_shards(path) if path.suffix == ".parquet" else None
    if shards is not None:
        return _finish(path, read_shards(shards), root or shards.root, "parquet shards")
    return _read_file(path, root)


def _read_file(path: Path, root: Path | None) -> Source:
    kind, line = sniff_file(path)
    if kind == "list":
        return _read_list(path, root)
    if kind == "tar":
        table = _start_above(read_tars([path], path.parent), path.parent, root)
    elif kind == "parquet":
        table = read_parquet(path)
    elif kind == "csv":
        table = read_csv(path, line)
    elif kind == "paths":
        table = read_paths(path)
    else:
        table = read_json(path) if kind == "json" else read_jsonl(path)
        kind = kind if dialect(table) == "plain" else f"{dialect(table)} {kind}"
    return _finish(path, table, root or path.parent, kind)


def _read_list(path: Path, root: Path | None) -> Source:
    def read_annotation(file: Path, media: Path) -> pl.DataFrame:
        if sniff_file(file)[0] in ("list", "tar"):
            raise DataError(f"{path}: {file} is no annotation; expected a JSON list, jsonl, csv or parquet")
        return _read_file(file, media).table

    table, common, starts = read_dataset_list(path, root, read_annotation)
    return Source(table, root or common, "list", starts)


def _read_folder(folder: Path, root: Path | None) -> Source:
    shards = find_shards(folder)
    if shards is not None:
        return _finish(folder, read_shards(shards), root or shards.root, "parquet shards")
    if tars := find_tars(folder):
        return _finish(folder, _start_above(read_tars(tars, folder), folder, root), root or folder, "tar")
    if files := find_csv(folder):
        table, starts = read_csv_folder(folder, files)
        return _finish(folder, table, root or folder, "csv folder", starts)
    if has_media(folder):
        return _finish(folder, _start_above(read_media_folder(folder), folder, root), root or folder, "media folder")
    inside = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    raise DataError(
        f"{folder}: no table, tar or media in it (it holds: {inside}); name a file or a folder with parquet, csv, "
        "tar, video or image files"
    )


def _start_above(table: pl.DataFrame, folder: Path, root: Path | None) -> pl.DataFrame:
    """Paths below `folder` as absolute ones, where they are to start from another root."""
    if root is None:
        return table
    return table.with_columns(path=pl.lit(f"{os.path.abspath(folder)}/") + pl.col("path"))


def _finish(
    path: Path, table: pl.DataFrame, root: Path, kind: str, starts: list[tuple[int, str]] | None = None
) -> Source:
    if not table.height:
        raise DataError(f"{path}: no row in it; a source needs at least one clip")
    place: Place = row_place if not starts else lambda row: place_in(starts, row)
    ours = to_our_columns(table, root=root, source=str(path), place=place)
    if (ours["caption"] == "").all():
        _log.warning("%s: no captions in it; all %d rows have an empty one", path, ours.height)
    return Source(ours, root, kind, starts or [])
