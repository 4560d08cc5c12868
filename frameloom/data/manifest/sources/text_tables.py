"""Tables as text: csv, lists of paths, JSON lists and one JSON object a line.

A csv has a header (SDXL's is dir,text); a list of video paths has none. JSON is a list of objects (CogVideoX-Fun's
metadata, Open-Sora-Plan's annotations) or one object a line. Entries are turned into columns in portions, so that a
long file costs its text and its columns, not an object for each entry. A caption may be one text or a list of them.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from frameloom.core.errors import DataError
from frameloom.core.logging import get_logger
from frameloom.core.text_files import KINDS, has_whole_letters, may_hold_half_letters, not_utf8, parse_object, read_text
from frameloom.data.manifest.sources.columns import ALIASES, NUMBER_NAMES, PATH_NAMES, TEXT_NAMES, WINDOW

_log = get_logger(__name__)

_SEPARATORS = (",", "\t", ";", "|")
# What tools write for a missing number.
_NOTHING = ("", "nan", "none", "null", "n/a", "na")
_PORTION = 50_000
_CAPTIONS = ("caption", *ALIASES["caption"])
_SPACE = re.compile(r"[ \t\r\n]*")

Entry = tuple[str, dict[str, Any]]
"""(where it stands, the object)."""


def header_cells(line: str) -> tuple[str, list[str]]:
    """(separator, column names) of a first line; the separator is the one that cuts it most often."""
    separator = max(_SEPARATORS, key=line.count)
    return separator, [cell.strip().strip('"') for cell in line.rstrip("\r\n").split(separator)]


def read_csv(path: Path, first_line: str) -> pl.DataFrame:
    """The table with numbers where every value of a column is one; a missing caption is an empty one."""
    separator, cells = header_cells(first_line)
    try:
        table = pl.read_csv(
            path,
            separator=separator,
            infer_schema_length=None,
            schema_overrides={cell: pl.String for cell in cells if cell in TEXT_NAMES},
        )
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise DataError(f"{path}: not a readable csv table ({reason}){_find_ragged(path, separator)}") from error
    names = [name.strip() for name in table.columns]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{path}: two columns of its first line are named '{twice}'; rename one of them")
    table = table.rename(dict(zip(table.columns, names, strict=True)))
    table = table.with_columns(
        [_numbers(table[name]) for name in (*NUMBER_NAMES, *WINDOW) if table.schema.get(name) == pl.String]
    )
    # A csv cannot tell an empty caption from none.
    caption = next((name for name in _CAPTIONS if name in table.columns), None)
    if caption is not None and (missing := table[caption].null_count()):
        _log.warning("%s: %d of %d rows have no caption; they get an empty one", path, missing, table.height)
        table = table.with_columns(pl.col(caption).fill_null(""))
    return table


def read_paths(path: Path) -> pl.DataFrame:
    """A path a line and nothing else, as for training an autoencoder."""
    lines = read_text(path).splitlines()
    paths = pl.Series("path", lines, dtype=pl.String).str.strip_chars()
    return paths.filter(paths != "").to_frame()


def find_csv(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.csv") if file.is_file())


def read_csv_folder(folder: Path, files: list[Path]) -> tuple[pl.DataFrame, list[tuple[int, str]]]:
    """All tables of a folder, one after another, and where each of them starts."""
    tables: list[pl.DataFrame] = []
    starts: list[tuple[int, str]] = []
    for file in files:
        with file.open(encoding="utf-8-sig", errors="replace") as text:
            line = text.readline()
        _, cells = header_cells(line)
        if not set(cells) & set(PATH_NAMES):
            raise DataError(
                f"{file}: its first line names no column of files (found: {', '.join(cells)}); every csv of "
                f"{folder} is read: name the columns dir,text or move this file away"
            )
        starts.append((sum(table.height for table in tables), file.name))
        tables.append(read_csv(file, line))
    return pl.concat(tables, how="diagonal_relaxed", rechunk=True), starts


def _numbers(column: pl.Series) -> pl.Series:
    """Numbers where every other value means null; else the text, whose first wrong value a later check names."""
    text = column.str.strip_chars()
    known = pl.select(pl.when(~text.str.to_lowercase().is_in(_NOTHING)).then(text)).to_series()
    numbers = known.cast(pl.Float64, strict=False)
    return numbers.alias(column.name) if numbers.null_count() == known.null_count() else known.alias(column.name)


def _find_ragged(path: Path, separator: str) -> str:
    """Where the number of cells changes: what is wrong with most unreadable tables."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as text:
            rows = csv.reader(text, delimiter=separator)
            width = len(next(rows))
            for cells in rows:
                if cells and len(cells) > width:
                    return (
                        f"; line {rows.line_num} has {len(cells)} cells, the header {width}: "
                        "put captions with a separator in them into double quotes"
                    )
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except (csv.Error, StopIteration):
        return "; write it again"
    return "; write it again"


def read_json(path: Path) -> pl.DataFrame:
    return _name_dialect(entries_to_table(_list_entries(path), source=str(path)))


def read_jsonl(path: Path) -> pl.DataFrame:
    try:
        if not may_hold_half_letters(path):
            table = pl.read_ndjson(path, infer_schema_length=None)
            texts = [table[name] for name in _CAPTIONS if table.schema.get(name) == pl.String]
            # polars writes a list as text when other lines of the column hold text.
            if not any(text.str.starts_with("[").any() for text in texts):
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
    tables = []
    remaining = iter(entries)
    while portion := list(islice(remaining, _PORTION)):
        names = list(dict.fromkeys(name for _, value in portion for name in value))
        tables.append(pl.DataFrame([_column(name, portion, source) for name in names]))
    if not tables:
        raise DataError(f"{source}: no entry in it; a source needs at least one clip")
    # Where one portion has lists of captions and another only single ones, all become lists.
    for name in _CAPTIONS:
        if any(isinstance(table.schema.get(name), pl.List) for table in tables):
            one = pl.when(pl.col(name).is_not_null()).then(pl.concat_list(name)).alias(name)
            tables = [table.with_columns(one) if table.schema.get(name) == pl.String else table for table in tables]
    try:
        return pl.concat(tables, how="diagonal_relaxed", rechunk=True)
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

    def skip(index: int) -> int:
        found = _SPACE.match(text, index)
        return found.end() if found else index

    def line(index: int) -> str:
        return f"line {text.count(chr(10), 0, index) + 1}"

    index = skip(text.index("[") + 1)
    number = 0
    while text[index : index + 1] != "]":
        try:
            value, index = decoder.raw_decode(text, index)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: entry {number}, {line(index)}: not JSON ({error}); repair it") from error
        if not isinstance(value, dict):
            raise DataError(f"{path}: entry {number} is {KINDS.get(type(value), 'null')}; expected an object per clip")
        yield f"entry {number}", value
        number += 1
        index = skip(index)
        if text[index : index + 1] == ",":
            index = skip(index + 1)
        elif text[index : index + 1] != "]":
            raise DataError(f"{path}: {line(index)}: expected ',' or ']' behind entry {number - 1}; it is cut")
    if text[index + 1 :].strip():
        raise DataError(f"{path}: {line(index + 1)}: more text behind the list; repair it")


def _line_entries(path: Path) -> Iterator[Entry]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}: line {number}"
                    yield f"line {number}", parse_object(line, where=where, error=DataError, fix="write one per clip")
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error


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
