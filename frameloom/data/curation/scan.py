"""Scan of a source: sizes, lengths and frame rates of all files, written as a manifest.

Many processes read headers only. Progress is kept beside the output in `<out>.scan/`, so that a scan can be resumed and
split into shards; a file is read again when its size or modification time differs. Broken files are rows of
`<out>.errors.parquet` and are left out of the manifest.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import polars as pl
from numpy.typing import NDArray

from frameloom.core.errors import ConfigError, DataError
from frameloom.core.files import atomic_file, write_json
from frameloom.core.progress import ProgressBar
from frameloom.core.random import bits_at, key, uniform_at
from frameloom.core.units import format_bytes
from frameloom.data.curation.inspection import STUCK, FileWork, Job, WorkOptions, run_jobs
from frameloom.data.manifest.manifest import write_manifest
from frameloom.data.media.tar_members import MEMBER_MARK

# Records of another version are not understood; raise it when the meaning of a field changes.
_VERSION = 1
NO_WINDOW = "window outside the file"
# Columns of the source with the names of our notes get this before them, until the notes are taken off again.
_ASIDE = "of the source: "
_NOTES = ("row", "size", "mtime_ns", "audited", "reason", "stage", "error", "noted_ns", "member_bytes")
_PART_RECORDS = 4096
_PART_S = 20.0
_FACTS = "store.json"
SCHEMA: dict[str, Any] = {
    "path": pl.String(),
    "size": pl.Int64(),
    "mtime_ns": pl.Int64(),
    "audited": pl.Boolean(),
    "kind": pl.String(),
    "height": pl.Int32(),
    "width": pl.Int32(),
    "frames": pl.Int32(),
    "fps": pl.Float64(),
    "codec": pl.String(),
    "rotation": pl.Int32(),
    "vfr": pl.Boolean(),
    "reason": pl.String(),
    "stage": pl.String(),
    "error": pl.String(),
}


def parse_shard(text: str) -> tuple[int, int]:
    """(index from 0, count) of "i/n": one of n parts of a list, chosen by the paths alone."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = (int(number) for number in found.groups()) if found else (0, 0)
    if not found or not 0 <= index < count:
        raise ConfigError(f"--shard is '{text}'; write i/n with i from 0 to n-1, such as 0/4")
    return index, count


@dataclass(frozen=True)
class ScanOptions(WorkOptions):
    """`audit` is the share of good files to decode."""

    audit: float = 0.0
    seed: int = 0


def errors_path(out: Path) -> Path:
    return out.with_suffix(".errors.parquet")


def open_scan_store(out: Path, root: Path) -> RecordStore:
    """The progress of a scan to `out`."""
    what = {"work": "scan", "version": _VERSION, "root": str(root.resolve())}
    return RecordStore(out.with_suffix(".scan"), what=what, schema=SCHEMA)


def scan_files(
    table: pl.DataFrame, root: Path, out: Path, options: ScanOptions, *, shard: tuple[int, int] | None = None
) -> pl.DataFrame:
    """Look at the files of `table` (column `path`), or of one shard of it, and note what they are; the new records."""
    store = open_scan_store(out, root)
    paths = list_files(fold_members(table))
    codes = path_codes(paths["path"])
    if shard is not None:
        inside = bits_at(key(options.seed, "scan shard"), codes) % np.uint64(shard[1]) == shard[0]
        paths, codes = paths.filter(pl.Series(inside)), codes[inside]
    audited = uniform_at(key(options.seed, "scan audit"), codes) < options.audit
    plan = paths.with_columns(wants_audit=pl.Series(audited))
    plan = plan.join(store.read().select("path", "size", "mtime_ns", "audited"), on="path", how="left")
    run_into_store(store, FileWork(root), plan, "scan", options)
    return store.read().join(paths, on="path", how="semi")


def fold_members(table: pl.DataFrame) -> pl.DataFrame:
    """A table in which each file has its own path: `shard.tar!0001.mp4` for a file inside a tar.

    Columns that are named as the notes of a scan step aside, so that both can stand in one table.
    """
    table = table.rename({name: _ASIDE + name for name in _NOTES if name in table.columns})
    if not {"member", "offset", "bytes"} <= set(table.columns):
        return table
    inside = pl.col("member").is_not_null()
    path = pl.when(inside).then(pl.col("path") + MEMBER_MARK + pl.col("member")).otherwise("path")
    return table.with_columns(path.alias("path"), member_bytes="bytes")


def unfold_members(table: pl.DataFrame) -> pl.DataFrame:
    """The inverse of `fold_members`, for a table without notes."""
    if "member_bytes" in table.columns:
        mark = pl.lit(MEMBER_MARK) + pl.col("member")
        path = pl.when(pl.col("member").is_not_null()).then(pl.col("path").str.strip_suffix(mark)).otherwise("path")
        table = table.with_columns(path.alias("path")).drop("member_bytes")
    return table.rename({name: name.removeprefix(_ASIDE) for name in table.columns if name.startswith(_ASIDE)})


def list_files(table: pl.DataFrame) -> pl.DataFrame:
    """The different files of a folded table, with the byte range of those inside tars."""
    location = ["member", "offset", "member_bytes"] if "member_bytes" in table.columns else []
    return table.select("path", *location).unique("path", maintain_order=True)


def member_of(row: Mapping[str, Any]) -> tuple[str, int, int] | None:
    """(name, first byte, number of bytes) of a row of a folded table; None for a file outside tars."""
    if row.get("member_bytes") is None or row["member"] is None:
        return None
    return row["member"], row["offset"], row["member_bytes"]


def path_codes(paths: pl.Series) -> NDArray[np.int64]:
    """A number per path that is the same on every machine, to key draws with."""
    codes = (zlib.crc32(path.encode("utf-8", "surrogatepass")) for path in paths)
    return np.fromiter(codes, dtype=np.int64, count=len(paths))


def run_into_store(store: RecordStore, work: FileWork, plan: pl.DataFrame, title: str, options: WorkOptions) -> None:
    """Inspect the files of `plan` with a progress bar; what is done when this is interrupted stays done.

    `plan` has `size`, `mtime_ns` and perhaps `audited` of earlier records.
    """

    def jobs() -> Iterator[Job]:
        for row in plan.iter_rows(named=True):
            wants_audit = row.get("wants_audit", False)
            size, mtime_ns = (row["size"], row["mtime_ns"]) if row.get("audited") or not wants_audit else (None, None)
            yield Job(row["path"], size, mtime_ns, wants_audit, member_of(row))

    num_bad = 0
    with ProgressBar(title, plan.height) as bar:
        try:
            for record in run_jobs(work, jobs(), options):
                if not record.pop("unchanged", False):
                    num_bad += record.get("reason") is not None
                    store.add(record)
                bar.advance(note=f"{num_bad} broken" if num_bad else "")
        finally:
            store.flush()


@dataclass(frozen=True)
class ScanResult:
    """What a finished scan found."""

    out: Path
    root: Path
    good: pl.DataFrame
    errors: pl.DataFrame
    num_audited: int


def finish_scan(table: pl.DataFrame, root: Path, out: Path) -> ScanResult:
    """Join the source with what is known of its files and write the manifest and the list of broken ones."""
    store = open_scan_store(out, root)
    records = store.read()
    joined = join_records(fold_members(table), records)
    missing = joined.filter(pl.col("audited").is_null())
    if missing.height:
        raise DataError(
            f"{out}: {missing.height} of {table.height} rows have not been scanned yet, the first is "
            f"'{missing['path'][0]}'; run the scan, or all of its shards, to the end and then merge"
        )
    errors = joined.filter(pl.col("reason").is_not_null()).select("row", "path", "reason", "stage", "error")
    good = joined.filter(pl.col("reason").is_null())
    num_audited = int(good["audited"].sum()) + int((errors["stage"] == "decode").sum())
    good = unfold_members(good.drop("row", "audited", "reason", "stage", "error", "mtime_ns"))
    write_manifest(out, good)
    with atomic_file(errors_path(out)) as temporary:
        errors.write_parquet(temporary)
    store.join()
    return ScanResult(out, root, good, errors, num_audited)


def join_records(table: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    """The source with measured columns instead of its own, and `reason` where a file is broken.

    `row` counts the rows of the source; `audited` is null where a file has no record yet.
    """
    if "start_frame" in table.columns:
        # Ends for windows that the source gives by their length, which the file's own is about to replace.
        ends = {"end_frame": pl.col("end_frame"), "frames": pl.col("start_frame") + pl.col("frames")}
        table = table.with_columns(end_frame=pl.coalesce(end for name, end in ends.items() if name in table.columns))
    taken = set(records.columns) - {"path"} | {"bytes", "row"}
    kept = table.drop([name for name in table.columns if name in taken]).with_row_index("row")
    facts = records.rename({"size": "bytes"}).drop("noted_ns")
    joined = kept.join(facts, on="path", how="left", maintain_order="left")
    if "start_frame" in joined.columns:
        joined = _apply_windows(joined)
    first = ["path", "caption", "kind", "height", "width", "frames", "fps"]
    rest = [name for name in joined.columns if name not in first]
    return joined.with_columns(pl.col("caption").fill_null("")).select([*first, *rest])


def _apply_windows(joined: pl.DataFrame) -> pl.DataFrame:
    """Rows that mean part of a file: what of it is really there; a window behind the end is an error."""
    start, end, frames = pl.col("start_frame"), pl.col("end_frame"), pl.col("frames")
    has_window = start.is_not_null() & frames.is_not_null()
    is_outside = has_window & (start >= frames) & pl.col("reason").is_null()
    text = pl.format("{}: the window starts at frame {}, the file has {}; check the row", "path", start, frames)
    joined = joined.with_columns(
        pl.when(is_outside).then(pl.lit(NO_WINDOW)).otherwise("reason").alias("reason"),
        pl.when(is_outside).then(pl.lit("header")).otherwise("stage").alias("stage"),
        pl.when(is_outside).then(text).otherwise("error").alias("error"),
        pl.when(has_window).then(pl.min_horizontal(end, frames)).otherwise(end).alias("end_frame"),
    )
    return joined.with_columns(pl.when(has_window).then(end - start).otherwise(frames).cast(pl.Int32).alias("frames"))


class RecordStore:
    """Records of one kind of work (`what`) on the files below `root`. Parts are committed every few seconds."""

    def __init__(self, folder: Path, *, what: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
        self.folder = folder
        self._schema = {**schema, "noted_ns": pl.Int64()}
        self._open: list[dict[str, Any]] = []
        self._since_s = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _FACTS
        if not path.exists():
            if any(self.folder.iterdir()):
                raise DataError(f"{self.folder}: not empty and no progress of a scan or check; choose another --out")
            write_json(path, dict(what))
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: damaged ({error}); remove {self.folder} to start afresh") from error
        if found != dict(what):
            raise DataError(
                f"{self.folder}: holds the progress of other work\n  wanted {dict(what)}\n  found  {found}\n"
                "remove the folder to start afresh, or choose another --out"
            )

    def read(self) -> pl.DataFrame:
        """The newest record of every path; DataError for an unreadable part."""
        parts = [pl.DataFrame(schema=self._schema)]
        for path in sorted(self.folder.glob("part-*.parquet")):
            try:
                parts.append(pl.read_parquet(path).select(list(self._schema)).cast(self._schema))  # type: ignore[arg-type]
            except FileNotFoundError:
                continue  # another process has just joined the parts; its joined one is there
            except (pl.exceptions.PolarsError, OSError) as error:
                raise DataError(f"{path}: damaged ({error}); remove it, its files are scanned again") from error
        table = pl.concat(parts)
        return table.sort("noted_ns").unique("path", keep="last", maintain_order=True)

    def add(self, record: Mapping[str, Any]) -> None:
        self._open.append({name: record.get(name) for name in self._schema} | {"noted_ns": time.time_ns()})
        if len(self._open) >= _PART_RECORDS or time.monotonic() - self._since_s >= _PART_S:
            self.flush()

    def flush(self) -> None:
        if self._open:
            self._write(pl.DataFrame(self._open, schema=self._schema))
        self._open = []
        self._since_s = time.monotonic()

    def _write(self, table: pl.DataFrame) -> None:
        with atomic_file(self.folder / f"part-{time.time_ns():020d}-{uuid4().hex[:8]}.parquet") as temporary:
            table.write_parquet(temporary)

    def join(self) -> None:
        """Make one part of many; a crash on the way leaves records twice, which is harmless."""
        old = sorted(self.folder.glob("part-*.parquet"))
        if len(old) > 1:
            self._write(self.read())
            for path in old:
                path.unlink(missing_ok=True)


def describe_scan(result: ScanResult) -> list[str]:
    """What was found, as lines to print."""
    good, errors = result.good, result.errors
    videos = good.filter(pl.col("kind") == "video")
    hours = float((videos["frames"] / videos["fps"]).sum()) / 3600
    lines = [
        f"{result.out}: {good.height:,} of {good.height + errors.height:,} files: {videos.height:,} videos "
        f"({hours:.2f} h) and {good.height - videos.height:,} images, {format_bytes(int(good['bytes'].sum()))}"
    ]
    if good.height:
        lines.append("sizes: " + _spell_counts(good.select(pl.format("{}x{}", "width", "height")).to_series(), 8))
    if videos.height:
        frames = videos["frames"].to_numpy()
        low, middle, high = (int(value) for value in np.quantile(frames, [0, 0.5, 1], method="lower"))
        odd = f"; {int(videos['vfr'].sum()):,} of variable rate, {int((videos['rotation'] != 0).sum()):,} turned"
        lines.append(f"frames: {low} to {high}, half of them up to {middle}{odd}")
        lines.append("frames per second: " + _spell_counts(videos["fps"].round(2), 6))
    if errors.height:
        lines.append(f"broken: {errors.height:,} ({_spell_counts(errors['reason'], 9)}); see {errors_path(result.out)}")
    if (errors["reason"] == STUCK).any():
        lines.append("files that were stuck are tried again by the next call")
    if result.num_audited:
        num_failed = int((errors["stage"] == "decode").sum())
        lines.append(f"audit: {result.num_audited:,} files decoded at three positions, {num_failed:,} failed")
    return lines + describe_root(result.out, result.root)


def describe_root(out: Path, root: Path) -> list[str]:
    """A line for people whose manifest does not lie at the root of its paths, where it would be looked for."""
    if out.parent.resolve() == root.resolve():
        return []
    return [f"its paths start from {root}: give that folder (--root, or data.root in a recipe) where you use it"]


def _spell_counts(values: pl.Series, num_shown: int) -> str:
    counts = values.alias("value").value_counts().sort(["count", "value"], descending=[True, False])
    shown = [f"{value} {count:,}" for value, count in counts.head(num_shown).iter_rows()]
    more = counts.height - num_shown
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
