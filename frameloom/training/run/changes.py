"""Differences between the recipe and rows that a run was started with and those of this start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import RunError
from frameloom.core.files import atomic_file
from frameloom.core.logging import get_logger
from frameloom.data.manifest.manifest import TRAINED_ON, Manifest
from frameloom.data.manifest.sources.columns import REQUIRED

_log = get_logger(__name__)
_ABSENT = "(not there)"
# Sections and keys that do not change what is learnt from one step to the next: length, speed, files, what is shown.
_HARMLESS = (
    "name",
    "run",
    "data.workers",
    "data.timeout_s",
    "data.bad_limit",
    "train.steps",
    "train.epochs",
    "train.log_every",
    "train.save_every",
    "train.async_save",
    "train.checkpoint",
    "train.keep",
    "optim.offload",
    "train.device",
    "train.recompute",
    "train.compile",
    "train.encoder_offload",
    "train.gc_every",
    "train.max_device_memory",
    "train.oom_split",
    "train.preflight",
    "train.side_by_side",
    "train.deterministic",
    "train.profile",
    "train.on_nonfinite",
    "train.nonfinite_limit",
    "parallel",
    "validation",
    "sample",
)
# Inside one of those: how many micro-batches a step has.
_HARMFUL = ("parallel.data",)
# A larger manifest is not copied: its own size is what it would cost each run.
MAX_ROWS = 2_000_000
_NUM_SHOWN = 5
_KEY = ("path", "occurrence")


@dataclass(frozen=True)
class Change:
    """A key that differs; a harmless one does not change what is learnt."""

    key: str
    before: Any
    after: Any

    @property
    def is_harmless(self) -> bool:
        harmless, harmful = (
            any(f"{self.key}.".startswith(f"{name}.") for name in names) for names in (_HARMLESS, _HARMFUL)
        )
        return harmless and not harmful

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def find_changes(before: Recipe, after: Recipe) -> list[Change]:
    """Every key that differs, in order of their names."""
    old, new = _flatten(before.model_dump(mode="json")), _flatten(after.model_dump(mode="json"))
    return [
        Change(key, old.get(key, _ABSENT), new.get(key, _ABSENT))
        for key in sorted(old.keys() | new.keys())
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]


def check_changes(changes: list[Change], *, where: str, step: int, accept: bool) -> None:
    """Tell all changes; RunError lists those that change what is learnt, unless they are accepted."""
    for change in changes:
        tell = _log.info if change.is_harmless else _log.warning
        tell("%s: changed since the last start: %s", where, change)
    serious = [change for change in changes if not change.is_harmless]
    if serious and not accept:
        listed = "\n".join(f"  {change}" for change in serious)
        raise RunError(
            f"{where}: the recipe has changed since step {step} in what is learnt:\n{listed}\n"
            "put these keys back, start a new run with --name, or go on all the same with --accept-recipe-change"
        )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix.removesuffix("."): value}
    return {key: leaf for name, part in value.items() for key, leaf in _flatten(part, f"{prefix}{name}.").items()}


def write_rows(path: Path, manifest: Manifest) -> None:
    """Put down what decides the training: one line a row, in order."""
    if len(manifest) > MAX_ROWS:
        path.unlink(missing_ok=True)
        return
    with atomic_file(path) as temporary:
        _take_table(manifest).write_parquet(temporary)


def describe_changes(path: Path, manifest: Manifest) -> str:
    """What became of the rows since `write_rows`, in words."""
    try:
        kept = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError):
        return f"it has {len(manifest):,} rows now; which ones changed is not known, the run has no copy of them"
    before, after = (_number(table) for table in (kept, _take_table(manifest)))
    removed = before.join(after, on=_KEY, how="anti")["path"].to_list()
    added = after.join(before, on=_KEY, how="anti")["path"].to_list()
    found = [
        f"{len(paths):,} {what} ({_show(paths)})" for what, paths in (("removed", removed), ("added", added)) if paths
    ]
    if edited := _find_edited(before, after):
        found.append(f"{len(edited):,} edited ({_show(edited)})")
    if not found:
        found = ["the rows are in another order"]
    return ", ".join(found)


def _find_edited(before: pl.DataFrame, after: pl.DataFrame) -> list[str]:
    """Paths of rows that are in both and differ, with the columns that do."""
    columns = [name for name in after.columns if name not in (*_KEY, "row")]
    both = after.join(before, on=_KEY, how="inner", suffix=" before", maintain_order="left")
    differs = {name: both[name].ne_missing(both[f"{name} before"]) for name in columns}
    is_edited = pl.Series([False] * len(both), dtype=pl.Boolean)
    for column in differs.values():
        is_edited = is_edited | column
    return [
        f"{both['path'][row]}: {', '.join(name for name in columns if differs[name][row])}"
        for row in is_edited.arg_true().to_list()
    ]


def _take_table(manifest: Manifest) -> pl.DataFrame:
    """All columns that matter, as texts; one that the manifest lacks is null."""
    table = pl.DataFrame({name: _to_text(manifest.column(name)) for name in REQUIRED})
    more = [name for name in TRAINED_ON if name in manifest.columns]
    table = table.with_columns(_to_text(manifest.column(name)).alias(name) for name in more)
    return table.with_columns(pl.lit(None, dtype=pl.String).alias(name) for name in TRAINED_ON if name not in more)


def _to_text(column: pl.Series) -> pl.Series:
    return column.list.join("\n") if isinstance(column.dtype, pl.List) else column.cast(pl.String)


def _number(table: pl.DataFrame) -> pl.DataFrame:
    """One file may have several rows; their order distinguishes them."""
    return table.with_columns(occurrence=pl.int_range(pl.len()).over("path"))


def _show(texts: list[str]) -> str:
    more = f" and {len(texts) - _NUM_SHOWN:,} more" if len(texts) > _NUM_SHOWN else ""
    return "; ".join(texts[:_NUM_SHOWN]) + more
