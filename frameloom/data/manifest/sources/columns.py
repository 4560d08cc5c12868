"""Columns of other systems as manifest columns: names, types, kinds, frame windows, and paths below their root.

The result has `path`, `caption`, `kind`, `height`, `width`, `frames` and `fps` first, null where the source does not
say, and every other column behind them under its own name.

Rows of a part of a file have `start_frame` and `end_frame` (the first frame behind the window), and `frames` is the
window's length; rows without a window have nulls there. Open-Sora-Plan looks at the start alone; here the end counts
too, and where `num_frames` is given, it decides, as it does there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

import polars as pl

from frameloom.core.errors import DataError
from frameloom.data.media.decode import IMAGE_FORMATS, VIDEO_FORMATS

REQUIRED = ("path", "caption", "kind", "height", "width", "frames", "fps")
KINDS = ("video", "image")
COUNTS = ("height", "width", "frames")
# Other systems' names for our columns; the first one found is taken, and only if ours is not there.
ALIASES = {
    "path": ("file_path", "video_path", "image_path", "file_name", "video", "image", "dir"),
    "caption": ("text", "cap", "prompt"),
    "kind": ("type",),
    "frames": ("num_frames",),
    "control": ("control_file_path",),
}
PATH_NAMES = ("path", *ALIASES["path"])
TEXT_NAMES = (*PATH_NAMES, "caption", *ALIASES["caption"], "kind", "type", "frame_idx", "control", *ALIASES["control"])
NUMBER_NAMES = ("height", "width", "frames", "num_frames", "fps")

WINDOW = ("start_frame", "end_frame")

_RANGE = r"^\s*(\d+)\s*:\s*(\d+)\s*$"
_SCHEME = r"^[A-Za-z][A-Za-z0-9+.-]+:"
_UPWARD = r"(^|[/\\])\.\.([/\\]|$)"
_LAST_SUFFIX = r"(\.[^./\\]+)$"

Locate = Callable[[int], str]
"""Where a row stands in its file, in words."""


def locate_row(row: int) -> str:
    return f"row {row}"


def to_our_columns(table: pl.DataFrame, *, root: Path, source: str, locate: Locate = locate_row) -> pl.DataFrame:
    """The table with our columns; DataError names the first row and column that cannot be understood."""
    table = _rename(table)
    if "path" not in table.columns:
        raise DataError(
            f"{source}: no column names the files (it has: {', '.join(table.columns) or 'none'}); "
            f"name it 'path'; {', '.join(ALIASES['path'])} are understood too"
        )
    table = _split_captions(_split_resolution(_parse_members(table, source, locate)), source)
    for name in ("path", "caption"):
        if table.schema[name] != pl.String and table[name].null_count() < table.height:
            raise DataError(f"{source}: column '{name}' has type {table.schema[name]}; it must hold text")
    numbers = [*COUNTS, "fps", *(name for name in WINDOW if name in table.columns)]
    table = table.with_columns(
        pl.col("path", "caption").cast(pl.String), *(_parse_numbers(table, name, source, locate) for name in numbers)
    )
    # The kind is what the source says, else what the file's ending says; null for an unknown ending.
    suffix = pl.col("path").str.extract(_LAST_SUFFIX).str.to_lowercase()
    by_ending = (
        pl.when(suffix.is_in(list(VIDEO_FORMATS)))
        .then(pl.lit("video"))
        .when(suffix.is_in(list(IMAGE_FORMATS)))
        .then(pl.lit("image"))
    )
    is_given = "kind" in table.columns and table.schema["kind"] != pl.Null
    kind = pl.coalesce(pl.col("kind").cast(pl.String), by_ending) if is_given else by_ending
    table = _parse_windows(table.with_columns(kind=kind), source, locate)
    refuse_first(table, _window_rules(table.columns), source, locate)
    for name in ("path", "control") if has_control(table) else ("path",):
        table = _make_relative(table, name, root, source, locate)
    is_still = (pl.col("kind") == "image") & pl.col("frames").is_null()
    table = table.with_columns(frames=pl.when(is_still).then(1).otherwise(pl.col("frames")))
    return table.select(*REQUIRED, *(name for name in table.columns if name not in REQUIRED))


def path_rules(name: str = "path") -> list[tuple[str, pl.Expr, str]]:
    """(column, rows that are wrong, why) for paths that may be opened; a row need not have a control clip."""
    path = pl.col(name)
    rules = [
        ("must not be null", path.is_null() if name == "path" else pl.lit(False)),
        ("must name a file below the root", path == ""),
        ("must not hold a null byte", path.str.contains("\0", literal=True)),
        ("has a scheme; only plain paths below the root are opened", path.str.contains(_SCHEME)),
        ("is absolute; paths are relative to the root", path.str.starts_with("/") | path.str.starts_with("\\")),
        ("leaves the root by '..'; move the file below it or choose another root", path.str.contains(_UPWARD)),
    ]
    return [(name, wrong, why) for why, wrong in rules]


def has_control(table: pl.DataFrame) -> bool:
    """Whether rows name control clips: files beside the clips that say what happens in them (poses, edges, depth)."""
    return table.schema.get("control") == pl.String


def first_row(table: pl.DataFrame, wrong: pl.Expr) -> int | None:
    """The first row for which `wrong` is true."""
    rows = table.lazy().select(wrong.fill_null(False).arg_true().head(1)).collect().to_series()
    return int(rows[0]) if len(rows) else None


def refuse_first(
    table: pl.DataFrame, rules: list[tuple[str, pl.Expr, str]], source: str, locate: Locate = locate_row
) -> None:
    """DataError for the first rule that any row breaks."""
    for column, wrong, rule in rules:
        row = first_row(table, wrong)
        if row is not None:
            raise DataError(f"{source}: {locate(row)}, column '{column}': {table[column][row]!r} {rule}")


def _rename(table: pl.DataFrame) -> pl.DataFrame:
    """Columns of other names that hold what ours would: `image` may be pixels, `type` anything."""
    names = {}
    for ours, others in ALIASES.items():
        found = next((name for name in others if name in table.columns), None)
        if ours in table.columns or found is None:
            continue
        dtype = table.schema[found]
        if ours == "path" and dtype not in (pl.String, pl.Null):
            continue
        if ours == "kind" and not (dtype == pl.String and table[found].drop_nulls().is_in(KINDS).all()):
            continue
        names[found] = ours
    return table.rename(names)


def _split_resolution(table: pl.DataFrame) -> pl.DataFrame:
    """{height, width} as two columns; a plain number is Open-Sora's area and stays as it is."""
    dtype = table.schema.get("resolution")
    if not isinstance(dtype, pl.Struct) or not {"height", "width"} <= {field.name for field in dtype.fields}:
        return table
    sizes = pl.col("resolution").struct
    new = [sizes.field(name).alias(name) for name in ("height", "width") if name not in table.columns]
    return table.with_columns(new).drop("resolution")


def _parse_members(table: pl.DataFrame, source: str, locate: Locate) -> pl.DataFrame:
    """Places inside tars as numbers. A scan adds `bytes`, so `member` and `offset` of other meaning are refused."""
    if not {"member", "offset"} <= set(table.columns):
        return table
    if "bytes" not in table.columns or table.schema["member"] not in (pl.String, pl.Null):
        raise DataError(
            f"{source}: columns 'member' (text), 'offset' and 'bytes' (numbers) together say where a clip is in a tar; "
            "complete them, or rename 'member' if it means something else"
        )
    table = table.with_columns(
        pl.col("member").cast(pl.String), *(_parse_numbers(table, name, source, locate) for name in ("offset", "bytes"))
    )
    lacks = {name: pl.col("member").is_not_null() & pl.col(name).is_null() for name in ("offset", "bytes")}
    rules = [(name, wrong, "must not be null where member is not") for name, wrong in lacks.items()]
    refuse_first(table, rules, source, locate)
    return table


def _split_captions(table: pl.DataFrame, source: str) -> pl.DataFrame:
    """Several captions of a clip stay together in `captions`; `caption` is the first."""
    if "caption" not in table.columns:
        return table.with_columns(pl.lit("").alias("caption"))
    dtype = table.schema["caption"]
    if isinstance(dtype, pl.List):
        if dtype.inner not in (pl.String, pl.Null):
            raise DataError(f"{source}: column 'caption' has type {dtype}; it must hold text or lists of text")
        captions = pl.col("caption").cast(pl.List(pl.String)).list.drop_nulls()
        return table.with_columns(captions.alias("captions"), captions.list.first().alias("caption"))
    return table


def _parse_numbers(table: pl.DataFrame, name: str, source: str, locate: Locate) -> pl.Series:
    """A column as numbers, all but the frame rate whole; a table that once held NaN has them as 16.0."""
    dtype = pl.Float64() if name == "fps" else pl.Int64()
    if name not in table.columns or table[name].null_count() == table.height:
        return pl.Series(name, [None] * table.height, dtype=dtype)
    column = table[name]
    if not (column.dtype.is_numeric() if name == "fps" else column.dtype.is_integer() or column.dtype.is_float()):
        if column.dtype == pl.String:
            given = pl.col(name)
            row = first_row(table, given.is_not_null() & given.cast(pl.Float64, strict=False).is_null())
            if row is not None:
                raise DataError(f"{source}: {locate(row)}, column '{name}': {column[row]!r} is no number")
        wanted = "numbers (null for images)" if name == "fps" else "whole numbers"
        raise DataError(f"{source}: column '{name}' has type {column.dtype}; it must hold {wanted}")
    if name == "fps":
        return column.cast(pl.Float64).fill_nan(None)
    column = column.fill_nan(None) if column.dtype.is_float() else column
    counts = column.cast(pl.Int64, strict=False)
    given, count = pl.col("given"), pl.col("count")
    is_lost = given.is_not_null() & (count.is_null() | (given != count))
    row = first_row(pl.DataFrame({"given": column, "count": counts}), is_lost)
    if row is not None:
        raise DataError(f"{source}: {locate(row)}, column '{name}': {column[row]!r} is no whole number below 2**63")
    return counts


def _make_relative(table: pl.DataFrame, name: str, root: Path, source: str, locate: Locate) -> pl.DataFrame:
    """Absolute paths below the root lose it; whatever leaves the root is refused."""
    path = pl.col(name)
    for prefix in sorted({f"{str(form).rstrip('/')}/" for form in (root.absolute(), root.resolve())}, key=len):
        inside = pl.when(path.str.starts_with(prefix)).then(path.str.strip_prefix(prefix)).otherwise(path)
        table = table.with_columns(inside.alias(name))
    table = table.with_columns(path.str.replace(r"^(\./+)+", "").alias(name))
    row = first_row(table, path.str.starts_with("/"))
    if row is not None:
        outside = table.filter(path.str.starts_with("/"))[name]
        # The deepest folder above all of them is what the smallest and the largest share.
        common = os.path.commonpath([os.path.dirname(str(path)) for path in (outside.min(), outside.max())])
        hint = f"those outside lie below {common}" if common != "/" else "they share no folder"
        raise DataError(
            f"{source}: {locate(row)}, column '{name}': {table[name][row]!r} is absolute and outside the root {root}; "
            f"{hint}: give the folder that holds the media as the root (data.root)"
        )
    refuse_first(table, path_rules(name), source, locate)
    return table


def _parse_windows(table: pl.DataFrame, source: str, locate: Locate) -> pl.DataFrame:
    """The table with its windows as numbers; DataError names a row whose window is empty or not understood."""
    if set(WINDOW) & set(table.columns):
        return table
    if "frame_idx" in table.columns and table.schema["frame_idx"] == pl.String:
        starts, ends = (pl.col("frame_idx").str.extract(_RANGE, number) for number in (1, 2))
        column = "frame_idx"
    elif isinstance(table.schema.get("cut"), pl.List):
        cut = pl.col("cut").list
        column, starts, ends = "cut", cut.get(0, null_on_oob=True), cut.get(1, null_on_oob=True)
    else:
        return table
    given, start = pl.col(column), starts.cast(pl.Int64, strict=False)
    end = pl.coalesce(start + pl.col("frames"), ends.cast(pl.Int64, strict=False))
    with_window = table.with_columns(
        pl.when(given.is_not_null()).then(start).alias("start_frame"),
        pl.when(given.is_not_null()).then(end).alias("end_frame"),
    )
    wrong = given.is_not_null() & ~(pl.col("start_frame").is_between(0, pl.col("end_frame") - 1)).fill_null(False)
    row = first_row(with_window, wrong)
    if row is not None:
        value = with_window[column][row]
        shown = value.to_list() if isinstance(value, pl.Series) else value
        rule = "expected 'a:b', the first frame and the one behind the last, with b above a"
        raise DataError(f"{source}: {locate(row)}, column '{column}': {shown!r} is no window; {rule}")
    length = pl.col("end_frame") - pl.col("start_frame")
    return with_window.with_columns(pl.coalesce(pl.col("frames"), length).alias("frames"))


def _window_rules(names: Collection[str]) -> list[tuple[str, pl.Expr, str]]:
    """(column, rows that are wrong, why) for a table with these columns; no rule for one that knows no windows.

    A row without a window has two nulls. `frames`, the window's length, can stand for its end.
    """
    given = [name for name in WINDOW if name in names]
    if not given:
        return []
    start, end = (pl.col(name) if name in given else pl.lit(None, pl.Int64) for name in WINDOW)
    is_open = start.is_not_null() & end.is_null() & pl.col("frames").is_null()
    return [
        ("start_frame", is_open, "needs end_frame beside it, the first frame behind the window"),
        ("end_frame", start.is_null() & end.is_not_null(), "needs start_frame beside it, the window's first frame"),
        ("start_frame", start < 0, "must be 0 or more"),
        ("end_frame", end <= start, "must be above start_frame: it is the first frame behind the window"),
    ]
