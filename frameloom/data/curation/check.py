"""Check of a list of clips: which rows should not be trained on, and why. No file is deleted.

Files are inspected as in a scan; the search for near duplicates decodes three frames of each. The result is a clean
manifest and a list of reasons; progress is kept beside them in `<out>.check/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from frameloom.core.files import atomic_file
from frameloom.data.curation.frame_signatures import COLOUR_BYTES, find_duplicates
from frameloom.data.curation.inspection import (
    EMPTY,
    MISSING,
    NO_FILE,
    OUTSIDE,
    STUCK,
    UNREADABLE,
    WRONG_EXTENSION,
    FileWork,
    WorkOptions,
)
from frameloom.data.curation.scan import (
    NO_WINDOW,
    SCHEMA,
    RecordStore,
    describe_root,
    fold_members,
    join_records,
    list_files,
    run_into_store,
    unfold_members,
)
from frameloom.data.manifest.manifest import write_manifest

_VERSION = 1
Duplicates = Literal["off", "exact", "near"]

TOO_SHORT = "too short"
TOO_SMALL = "too small"
NO_CAPTION = "empty caption"
SAME_PATH = "duplicate path"
SAME_CONTENT = "duplicate content"
LOOKS_ALIKE = "near duplicate"
# In the order of the printed table.
REASONS = (
    *(MISSING, NO_FILE, OUTSIDE, EMPTY, WRONG_EXTENSION, UNREADABLE, STUCK, NO_WINDOW),
    *(TOO_SHORT, TOO_SMALL, NO_CAPTION, SAME_PATH, SAME_CONTENT, LOOKS_ALIKE),
)
_REASON_SCHEMA = {"row": pl.UInt32, "path": pl.String, "reason": pl.String, "detail": pl.String}


@dataclass(frozen=True)
class CheckOptions(WorkOptions):
    """`min_frames` applies to videos, `min_side` (pixels of the shorter side) to all files."""

    min_frames: int = 1
    min_side: int = 1
    needs_captions: bool = True
    duplicates: Duplicates = "near"
    timeout_s: float = 120.0


@dataclass(frozen=True)
class CheckResult:
    """`reasons` can hold several rows for one row of the source."""

    out: Path
    root: Path
    num_rows: int
    good: pl.DataFrame
    reasons: pl.DataFrame


def reasons_path(out: Path) -> Path:
    return out.with_suffix(".reasons.parquet")


def check_files(table: pl.DataFrame, root: Path, out: Path, options: CheckOptions) -> CheckResult:
    """Look at every file of `table`, write the clean manifest to `out` and the reasons beside it."""
    table = fold_members(table)
    what = {"work": "check", "version": _VERSION, "root": str(root.resolve()), "duplicates": options.duplicates}
    more: dict[str, Any] = {"hashes": pl.Binary(), "colours": pl.Binary(), "sha256": pl.String()}
    store = RecordStore(out.with_suffix(".check"), what=what, schema=SCHEMA | more)
    plan = list_files(table).join(store.read().select("path", "size", "mtime_ns"), on="path", how="left")
    work = FileWork(root, signatures=options.duplicates == "near", digests=options.duplicates == "exact")
    run_into_store(store, work, plan, "check", options)
    records = store.read().join(table.select("path").unique(), on="path", how="semi")
    joined = join_records(table, records.drop("hashes", "colours", "sha256"))
    reasons = _find_reasons(joined, records, options)
    good = _leave_out(joined, reasons).drop("row", "audited", "reason", "stage", "error", "mtime_ns")
    good = unfold_members(good)
    write_manifest(out, good)
    with atomic_file(reasons_path(out)) as temporary:
        reasons.write_parquet(temporary)
    store.join()
    return CheckResult(out, root, table.height, good, reasons)


def _find_reasons(joined: pl.DataFrame, records: pl.DataFrame, options: CheckOptions) -> pl.DataFrame:
    """Deduplicates among valid rows only and keeps one of each group."""
    broken = _take(joined, pl.col("reason").is_not_null(), pl.col("reason"), pl.col("error"))
    reasons = pl.concat([broken, *_find_by_value(joined, options)])
    # The second and later rows that mean the same file, and the same part of it.
    same = ["path", *(name for name in ("start_frame", "end_frame") if name in joined.columns)]
    marked = _leave_out(joined, reasons).with_columns(first=pl.col("row").min().over(same))
    repeated = pl.col("row") > pl.col("first")
    again = _take(marked, repeated, pl.lit(SAME_PATH), pl.format("the file of row {}", "first"))
    reasons = pl.concat([reasons, again])
    left = _leave_out(joined, reasons)
    copies = _find_copies(records.join(left, on="path", how="semi"), options.duplicates)
    names = {"path": pl.String, "reason": pl.String, "detail": pl.String}
    table = left.select("row", "path").join(pl.DataFrame(copies, schema=names, orient="row"), on="path", how="inner")
    return pl.concat([reasons, table.cast(_REASON_SCHEMA)]).sort("row", maintain_order=True)  # type: ignore[arg-type]


def _leave_out(joined: pl.DataFrame, reasons: pl.DataFrame) -> pl.DataFrame:
    return joined.join(reasons, on="row", how="anti", maintain_order="left")


def _take(joined: pl.DataFrame, wrong: pl.Expr, reason: pl.Expr, detail: pl.Expr) -> pl.DataFrame:
    chosen = joined.filter(wrong.fill_null(False))
    return chosen.select("row", "path", reason.alias("reason"), detail.alias("detail")).cast(_REASON_SCHEMA)  # type: ignore[arg-type]


def _find_by_value(joined: pl.DataFrame, options: CheckOptions) -> list[pl.DataFrame]:
    height, width, frames = pl.col("height"), pl.col("width"), pl.col("frames")
    is_fine = pl.col("reason").is_null()
    short = is_fine & (pl.col("kind") == "video") & (frames < options.min_frames)
    small = is_fine & (pl.min_horizontal(height, width) < options.min_side)
    silent = pl.lit(options.needs_captions) & (pl.col("caption").str.strip_chars() == "")
    return [
        _take(
            joined, short, pl.lit(TOO_SHORT), pl.format(f"{{}} frames, at least {options.min_frames} wanted", frames)
        ),
        _take(
            joined,
            small,
            pl.lit(TOO_SMALL),
            pl.format(f"{{}}x{{}} pixels, a side of at least {options.min_side} wanted", width, height),
        ),
        _take(joined, silent, pl.lit(NO_CAPTION), pl.lit("the caption is empty; write one, or train without captions")),
    ]


def _find_copies(records: pl.DataFrame, duplicates: Duplicates) -> list[tuple[str, str, str]]:
    """(path, reason, detail) of files whose content is that of another one, which stays: the larger picture, else the
    first path. Videos are compared with videos, images with images."""
    area = pl.col("height").cast(pl.Int64) * pl.col("width")
    ordered = records.with_columns(area=area).sort(["area", "path"], descending=[True, False])
    if duplicates == "exact":
        first = ordered.with_columns(first=pl.col("path").first().over("sha256"))
        same = first.filter(pl.col("path") != pl.col("first")).select("path", "first")
        return [(path, SAME_CONTENT, f"the same bytes as {like}") for path, like in same.iter_rows()]
    copies = []
    for num_frames in (1, 3) if duplicates == "near" else ():
        group = ordered.filter(pl.col("hashes").bin.size() == 8 * num_frames)
        if group.height < 2:
            continue
        hashes = np.frombuffer(b"".join(group["hashes"]), np.uint64).reshape(-1, num_frames)
        colours = np.frombuffer(b"".join(group["colours"]), np.uint8).reshape(-1, num_frames * COLOUR_BYTES)
        paths = group["path"]
        for clip, like, num_bits in find_duplicates(hashes, colours):
            detail = f"looks like {paths[like]}, {num_bits} of {64 * num_frames} bits differ"
            copies.append((paths[clip], LOOKS_ALIKE, detail))
    return copies


def describe_check(result: CheckResult) -> list[str]:
    """The counts as lines to print; a row with two reasons counts in both."""
    counts = dict(result.reasons.group_by("reason").len().iter_rows())
    width = max(len(reason) for reason in REASONS)
    lines = [f"{result.out}: {result.good.height:,} of {result.num_rows:,} rows are clean"]
    lines += [f"  {reason:<{width}}  {counts[reason]:>10,}" for reason in REASONS if counts.get(reason)]
    if result.reasons.height:
        lines.append(f"every row that was left out, and why: {reasons_path(result.out)}; no file was deleted")
    return lines + describe_root(result.out, result.root)
