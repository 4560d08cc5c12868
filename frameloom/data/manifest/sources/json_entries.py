"""Tables as JSON: a list of objects (CogVideoX-Fun's metadata, Open-Sora-Plan's annotations) or one object a line.

Entries are turned into columns in portions, so that a long file costs its text and its columns, not an object for
each of its entries. A caption may be one text or a list of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from frameloom.core.errors import DataError
from frameloom.core.text_files import KINDS, has_whole_letters, may_hold_half_letters, not_utf8, parse_object, read_text
from frameloom.data.manifest.sources.columns import ALIASES

_PORTION = 50_000
_CAPTIONS = ("caption", *ALIASES["caption"])
_SPACE = " \t\r\n"

Entry = tuple[str, dict[str, Any]]
"""(where it stands, the object)."""


def read_json(path: Path) -> pl.DataFrame:
    return _name_dialect(entries_to_table(_list_entries(path), source=str(path)))


def read_jsonl(path: Path) -> pl.DataFrame:
    try:
        if not may_hold_half_letters(path):
            table = pl.read_ndjson(path, infer_schema_length=None)
            if not _has_lists_as_text(table):
                return _name_dialect(table)
    except (pl.exceptions.PolarsError, OSError):
        pass  # read line by line below, which finds the line that is wrong
    return _name_dialect(entries_to_table(_line_entries(path), source=str(path)))


def dialect(table: pl.DataFrame) -> str:
    """Which system's columns these are, for messages."""
    if "file_path" in table.columns:
        return "cogvideox-fun"
    return "open-sora-plan" if {"cap", "frame_idx", "cut"} & set(table.columns) else "plain"


def entries_to_table(entries: Iterable[Entry], *, source: str) -> pl.DataFrame:
    """Columns from objects; DataError names the entry whose value is of another kind than those before it."""
    tables: list[pl.DataFrame] = []
    portion: list[Entry] = []
    for entry in entries:
        portion.append(entry)
        if len(portion) == _PORTION:
            tables.append(_portion_table(portion, source))
            portion = []
    if portion:
        tables.append(_portion_table(portion, source))
    if not tables:
        raise DataError(f"{source}: no entry in it; a source needs at least one clip")
    try:
        return pl.concat(_wrap_captions(tables), how="diagonal_relaxed", rechunk=True)
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{source}: the values of a column differ in kind ({error}); write them alike") from error


def _name_dialect(table: pl.DataFrame) -> pl.DataFrame:
    """Paths of Open-Sora-Plan 1.1 may come without the ending .mp4."""
    if dialect(table) != "open-sora-plan" or table.schema.get("path") != pl.String:
        return table
    bare = ~pl.col("path").str.contains(r"\.[A-Za-z0-9]+$")
    return table.with_columns(pl.when(bare).then(pl.col("path") + ".mp4").otherwise(pl.col("path")).alias("path"))


def _list_entries(path: Path) -> Iterator[Entry]:
    """The objects of a JSON list, decoded one by one."""
    text = read_text(path)
    decoder = json.JSONDecoder()
    place = _skip(text, text.index("[") + 1)
    number = 0
    while text[place : place + 1] != "]":
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: entry {number}, {_line(text, place)}: not JSON ({error}); repair it") from error
        if not isinstance(value, dict):
            raise DataError(f"{path}: entry {number} is {KINDS.get(type(value), 'null')}; expected an object per clip")
        yield f"entry {number}", value
        number += 1
        place = _skip(text, place)
        if text[place : place + 1] == ",":
            place = _skip(text, place + 1)
        elif text[place : place + 1] != "]":
            raise DataError(f"{path}: {_line(text, place)}: expected ',' or ']' behind entry {number - 1}; it is cut")
    if text[place + 1 :].strip():
        raise DataError(f"{path}: {_line(text, place + 1)}: more text behind the list; repair it")


def _line_entries(path: Path) -> Iterator[Entry]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        yield f"line {number}", parse_object(line, where=where, error=DataError, fix="write one per clip")


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in _SPACE:
        place += 1
    return place


def _line(text: str, place: int) -> str:
    return f"line {text.count(chr(10), 0, place) + 1}"


def _portion_table(entries: list[Entry], source: str) -> pl.DataFrame:
    names = list(dict.fromkeys(name for _, value in entries for name in value))
    return pl.DataFrame([_column(name, entries, source) for name in names])


def _column(name: str, entries: list[Entry], source: str) -> pl.Series:
    values = [value.get(name) for _, value in entries]
    if name in _CAPTIONS and any(isinstance(value, list) for value in values):
        values = [[value] if isinstance(value, str) else value for value in values]
    try:
        # Arrow keeps what polars' own constructor drops: fields that only later objects have, fractions in lists.
        return pl.Series(name, pl.from_arrow(pa.array(values)))
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise _find_odd(name, values, entries, source, error) from error


def _find_odd(name: str, values: list[Any], entries: list[Entry], source: str, error: Exception) -> DataError:
    first: str | None = None
    for (place, _), value in zip(entries, values, strict=True):
        if not has_whole_letters(json.dumps({name: value}, ensure_ascii=False)):
            return DataError(
                f"{source}: {place}, {name!r}: {value!r} holds half of a letter (\\ud800 to \\udfff); repair it"
            )
        kind = KINDS.get(type(value))
        first = first or kind
        if kind is not None and kind != first:
            return DataError(f"{source}: {place}, '{name}': {value!r} is {kind}, in entries before it {first}")
    return DataError(f"{source}: '{name}' cannot be read as a column ({error}); write its values alike")


def _wrap_captions(tables: list[pl.DataFrame]) -> list[pl.DataFrame]:
    """Where one portion has lists of captions and another only single ones, all become lists."""
    for name in _CAPTIONS:
        if any(isinstance(table.schema.get(name), pl.List) for table in tables):
            one = pl.when(pl.col(name).is_not_null()).then(pl.concat_list(name))
            tables = [
                table.with_columns(one.alias(name)) if table.schema.get(name) == pl.String else table
                for table in tables
            ]
    return tables


def _has_lists_as_text(table: pl.DataFrame) -> bool:
    """polars writes a list as text when other lines of the column hold text."""
    return any(
        table.schema.get(name) == pl.String and bool(table[name].str.starts_with("[").any()) for name in _CAPTIONS
    )
