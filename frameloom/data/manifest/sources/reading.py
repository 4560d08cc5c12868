"""Reading any source: a table, list, folder or tar of clips becomes one table with manifest columns.

| source | what it is |
|---|---|
| parquet, csv, jsonl, JSON list | a row per clip, with the columns of any of the systems we know |
| `merge_data.txt` and the like | Open-Sora-Plan's lists: media folder, embedding folders, annotation |
| a list of paths | a file a line, no captions |
| folder of csv | SDXL's `dir,text`; paths start from the folder |
| folder of parquet shards | one table, ours or Open-Sora's; results of scans among their clips are no shards |
| tar, folder of tars | webdataset; members are read in place |
| folder of media | a `.txt` beside each file is its caption |

The content decides the format; the ending only decides between error messages. Sizes that a source does not give are
null; `frameloom data scan` fills them in.
"""

from __future__ import annotations

import codecs
import json
import os
import tarfile
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from frameloom.core.errors import DataError
from frameloom.core.logging import get_logger
from frameloom.core.text_files import not_utf8
from frameloom.data.manifest.sources.columns import PATH_NAMES, locate_row, to_our_columns
from frameloom.data.manifest.sources.dataset_list import read_dataset_list
from frameloom.data.manifest.sources.media_files import find_tars, has_media, read_media_folder, read_tars
from frameloom.data.manifest.sources.parquet_tables import find_shards, read_parquet, read_shards
from frameloom.data.manifest.sources.text_tables import (
    dialect,
    find_csv,
    header_cells,
    read_csv,
    read_csv_folder,
    read_json,
    read_jsonl,
    read_paths,
)
from frameloom.data.media.decode import kind_of

__all__ = ["Source", "read_source"]

_log = get_logger(__name__)
_HEAD_BYTES = 1 << 20
_LISTED = (".json", ".jsonl", ".pkl", ".csv", ".parquet")
_KNOWN = "parquet, csv, jsonl, a JSON list, a list of sets (merge_data.txt), tar shards or a folder of media"
_UNPICKLE = (
    "a pickle can run code when opened, so it is not; on a machine where you trust the file, open it with Python's "
    "pickle module, write what it holds with json.dump, and name that .json here"
)
# First bytes of files that are something, but no table: what they are, and what to do.
_NO_TABLES = (
    (b"\x1f\x8b", "gzip-compressed; unpack it first: members of a compressed file cannot be read in place"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed; unpack it first"),
    (b"BZh", "bzip2-compressed; unpack it first"),
    (b"\xfd7zXZ", "xz-compressed; unpack it first"),
    (b"PK\x03\x04", "a zip or spreadsheet; unpack it, or save the sheet as csv"),
    (b"ARROW1", "an arrow file; write it as parquet"),
    (b"SQLite format 3", "a database; export its table as csv or parquet"),
    (b"\x93NUMPY", "a numpy array; a source is a table of paths and captions"),
    (b"\xff\xfe", "UTF-16 text; save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text; save it as UTF-8"),
    (b"\x89PNG", "an image; name the folder that holds it"),
    (b"\xff\xd8\xff", "an image; name the folder that holds it"),
    (b"\x1aE\xdf\xa3", "a video; name the folder that holds it"),
    (b"RIFF", "a video or an image; name the folder that holds it"),
)


@dataclass(frozen=True)
class Source:
    """A table of clips whose paths are relative to `root`; `starts` says which file each stretch of rows is from."""

    table: pl.DataFrame
    root: Path
    format: str
    starts: list[tuple[int, str]] = field(default_factory=list)

    def locate(self, row: int) -> str:
        """Where a row stands, in words; rows count from 0 within their file."""
        if not self.starts:
            return locate_row(row)
        start, name = self.starts[bisect_right([start for start, _ in self.starts], row) - 1]
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
    kind, line = _sniff_file(path)
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
        if _sniff_file(file)[0] in ("list", "tar"):
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
    source = Source(table, root, kind, starts or [])
    ours = to_our_columns(table, root=root, source=str(path), locate=source.locate)
    if (ours["caption"] == "").all():
        _log.warning("%s: no captions in it; all %d rows have an empty one", path, ours.height)
    return replace(source, table=ours)


def _sniff_file(path: Path) -> tuple[str, str]:
    """(format, first line of a text): parquet, tar, csv, paths, list, jsonl or json. DataError for anything else."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"PAR1"):
        return "parquet", ""
    if head[257:262] == b"ustar" or (path.suffix == ".tar" and tarfile.is_tarfile(path)):
        return "tar", ""
    _refuse_binary(path, head)
    try:
        # The head may end in the middle of a letter.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head, final=len(head) < _HEAD_BYTES)
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    if not text.strip():
        raise DataError(f"{path}: the file is empty; a source is {_KNOWN}")
    line = next(line for line in text.splitlines() if line.strip())
    if text.lstrip().startswith("["):
        rest = text.lstrip()[1:].lstrip()
        if rest.startswith("]"):
            raise DataError(f"{path}: the list is empty; a source needs at least one clip")
        if not rest.startswith("{"):
            raise DataError(
                f'{path}: a list whose first item is no object; expected [{{"path": ..., "caption": ...}}, ...]'
            )
        return "json", line
    if text.lstrip().startswith("{"):
        return _sniff_object(path, text, line), line
    return _sniff_lines(path, line), line


def _refuse_binary(path: Path, head: bytes) -> None:
    if path.suffix.lower() in (".pkl", ".pickle") or (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05"):
        raise DataError(f"{path}: {_UNPICKLE}")
    for magic, what in _NO_TABLES:
        if head.startswith(magic):
            raise DataError(f"{path}: this is {what}")
    if head[4:8] == b"ftyp":
        raise DataError(f"{path}: this is a video; name the folder that holds it")
    if b"\0" in head:
        raise DataError(f"{path}: not a readable table (binary, but not parquet); a source is {_KNOWN}")


def _sniff_object(path: Path, text: str, line: str) -> str:
    first = _parse(line)
    if isinstance(first, dict) and "shardlist" not in first:
        return "jsonl"
    whole = first if first is not None else _parse(text)
    if not isinstance(whole, dict):
        raise DataError(
            f"{path}: its first line is not a JSON object; expected one object a line, or a list of objects"
        )
    if "shardlist" in whole:
        raise DataError(f"{path}: this is the index of tar shards; name the folder that holds the tars")
    keys = f" with the keys {', '.join(list(whole)[:8])}" if whole else ""
    raise DataError(f"{path}: one JSON object{keys}; expected a list of objects, or one object a line")


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None  # the caller says what is wrong, with the file's name


def _sniff_lines(path: Path, line: str) -> str:
    _, cells = header_cells(line)
    if set(cells) & set(PATH_NAMES):
        return "csv"
    items = [item.strip() for item in line.split(",")]
    if len(items) > 1 and items[-1].lower().endswith(_LISTED):
        return "list"
    if len(cells) == 1 and kind_of(cells[0]) is not None:
        return "paths"
    if kind_of(cells[0]) is not None:
        raise DataError(f"{path}: the first line is {line[:80]!r}, no header; put one above it, e.g. path,text")
    if len(cells) > 1 or path.suffix.lower() in (".csv", ".tsv"):
        raise DataError(
            f"{path}: its first line names no column of files (found: {', '.join(cells)[:200]}); "
            f"expected one of {', '.join(PATH_NAMES)}"
        )
    raise DataError(f"{path}: not a readable table (it starts with {line[:40]!r}); a source is {_KNOWN}")
