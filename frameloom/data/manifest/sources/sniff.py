"""What a file or a folder is, by its content. The ending only decides between refusals."""

from __future__ import annotations

import codecs
import json
import tarfile
from pathlib import Path
from typing import Any

from frameloom.core.errors import DataError
from frameloom.core.text_files import not_utf8
from frameloom.data.manifest.sources.columns import PATH_NAMES, kind_of
from frameloom.data.manifest.sources.delimited import has_path_column, header_cells

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


def sniff_file(path: Path) -> tuple[str, str]:
    """(format, first line of a text): parquet, tar, csv, paths, list, jsonl or json. DataError for anything else."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"PAR1"):
        return "parquet", ""
    if head[257:262] == b"ustar" or (path.suffix == ".tar" and tarfile.is_tarfile(path)):
        return "tar", ""
    _refuse_binary(path, head)
    text = _decode(path, head)
    if not text.strip():
        raise DataError(f"{path}: the file is empty; a source is {_KNOWN}")
    line = next(line for line in text.splitlines() if line.strip())
    if text.lstrip().startswith("["):
        return _sniff_list(path, text), line
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


def _decode(path: Path, head: bytes) -> str:
    try:
        # The head may end in the middle of a letter.
        return codecs.getincrementaldecoder("utf-8-sig")().decode(head, final=len(head) < _HEAD_BYTES)
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error


def _sniff_list(path: Path, text: str) -> str:
    rest = text.lstrip()[1:].lstrip()
    if rest.startswith("]"):
        raise DataError(f"{path}: the list is empty; a source needs at least one clip")
    if not rest.startswith("{"):
        raise DataError(
            f'{path}: a list whose first item is no object; expected [{{"path": ..., "caption": ...}}, ...]'
        )
    return "json"


def _sniff_object(path: Path, text: str, line: str) -> str:
    first = _parse(line)
    if isinstance(first, dict) and "shardlist" not in first:
        return "jsonl"
    whole = first if first is not None else _parse(text)
    if isinstance(whole, dict):
        raise DataError(f"{path}: {_describe_object(whole)}")
    raise DataError(f"{path}: its first line is not a JSON object; expected one object a line, or a list of objects")


def _describe_object(value: dict[str, Any]) -> str:
    if "shardlist" in value:
        return "this is the index of tar shards; name the folder that holds the tars"
    keys = f" with the keys {', '.join(list(value)[:8])}" if value else ""
    return f"one JSON object{keys}; expected a list of objects, or one object a line"


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None  # the caller says what is wrong, with the file's name


def _sniff_lines(path: Path, line: str) -> str:
    _, cells = header_cells(line)
    if has_path_column(cells):
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
