"""Text tables: csv with a header, a list of video paths without one, and a folder of csv files (SDXL's dir,text)."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from frameloom.core.errors import DataError
from frameloom.core.logging import get_logger
from frameloom.core.text_files import not_utf8, read_text
from frameloom.data.manifest.sources.columns import ALIASES, NUMBER_NAMES, PATH_NAMES, TEXT_NAMES, WINDOW

_log = get_logger(__name__)

SEPARATORS = (",", "\t", ";", "|")
# What tools write for a missing number.
_NOTHING = ("", "nan", "none", "null", "n/a", "na")


def header_cells(line: str) -> tuple[str, list[str]]:
    """(separator, column names) of a first line; the separator is the one that cuts it most often."""
    separator = max(SEPARATORS, key=line.count)
    return separator, [cell.strip().strip('"') for cell in line.rstrip("\r\n").split(separator)]


def has_path_column(cells: list[str]) -> bool:
    return any(cell in PATH_NAMES for cell in cells)


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
        raise DataError(f"{path}: not a readable csv table ({_short(error)}){_find_ragged(path, separator)}") from error
    table = _strip_names(table, path)
    table = table.with_columns(
        [_numbers(table[name]) for name in (*NUMBER_NAMES, *WINDOW) if table.schema.get(name) == pl.String]
    )
    return _fill_captions(table, path)


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
        if not has_path_column(cells):
            raise DataError(
                f"{file}: its first line names no column of files (found: {', '.join(cells)}); every csv of "
                f"{folder} is read: name the columns dir,text or move this file away"
            )
        starts.append((sum(table.height for table in tables), file.name))
        tables.append(read_csv(file, line))
    return pl.concat(tables, how="diagonal_relaxed", rechunk=True), starts


def _strip_names(table: pl.DataFrame, path: Path) -> pl.DataFrame:
    names = [name.strip() for name in table.columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: two columns of its first line are named '{twice}'; rename one of them")
    return table.rename(dict(zip(table.columns, names, strict=True)))


def _numbers(column: pl.Series) -> pl.Series:
    """Numbers where every other value means null; else the text, whose first wrong value a later check names."""
    text = column.str.strip_chars()
    known = pl.select(pl.when(~text.str.to_lowercase().is_in(_NOTHING)).then(text)).to_series()
    numbers = known.cast(pl.Float64, strict=False)
    return numbers.alias(column.name) if numbers.null_count() == known.null_count() else known.alias(column.name)


def _fill_captions(table: pl.DataFrame, path: Path) -> pl.DataFrame:
    """A csv cannot tell an empty caption from none; the row is kept with a warning."""
    name = next((name for name in ("caption", *ALIASES["caption"]) if name in table.columns), None)
    if name is None or not (missing := table[name].null_count()):
        return table
    _log.warning("%s: %d of %d rows have no caption; they get an empty one", path, missing, table.height)
    return table.with_columns(pl.col(name).fill_null(""))


def _find_ragged(path: Path, separator: str) -> str:
    """Where the number of cells changes: what is wrong with most unreadable tables."""
    import csv

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


def _short(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
