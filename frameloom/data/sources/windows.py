"""Which frames of a file a row means: `frame_idx` "a:b" and `cut` [start, end] of Open-Sora-Plan.

The result is `start_frame` and `end_frame` (the first frame behind the window), and `frames` is the window's length:
that is what a clip of this row can offer. Rows without a window have nulls there. The originals look at the start
alone; here the end counts too, and where `num_frames` is given, it decides, as it does there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import polars as pl

from frameloom.core.errors import DataError

WINDOW = ("start_frame", "end_frame")
_RANGE = r"^\s*(\d+)\s*:\s*(\d+)\s*$"


def add_windows(table: pl.DataFrame, source: str, place: Callable[[int], str]) -> pl.DataFrame:
    """The table with its windows as numbers; DataError names a row whose window is empty or not understood."""
    if set(WINDOW) & set(table.columns):
        return table
    if "frame_idx" in table.columns and table.schema["frame_idx"] == pl.String:
        column, starts, ends = "frame_idx", _range_part(1), _range_part(2)
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
    row = with_window.select(wrong.arg_true().head(1)).to_series()
    if len(row):
        value = with_window[column][int(row[0])]
        shown = value.to_list() if isinstance(value, pl.Series) else value
        rule = "expected 'a:b', the first frame and the one behind the last, with b above a"
        raise DataError(f"{source}: {place(int(row[0]))}, column '{column}': {shown!r} is no window; {rule}")
    length = pl.col("end_frame") - pl.col("start_frame")
    return with_window.with_columns(pl.coalesce(pl.col("frames"), length).alias("frames"))


def window_rules(names: Collection[str]) -> list[tuple[str, pl.Expr, str]]:
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


def _range_part(number: int) -> pl.Expr:
    return pl.col("frame_idx").str.extract(_RANGE, number)
