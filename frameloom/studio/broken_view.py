"""Files that cannot be used: what scan and check listed beside a manifest, and what runs on it had to skip."""

from __future__ import annotations

from pathlib import Path

from frameloom.config.load import resolve
from frameloom.core.errors import FrameloomError
from frameloom.data.bad_clips import read_bad_clips
from frameloom.data.report import read_broken
from frameloom.studio.clip_table import ClipTable
from frameloom.studio.context import StudioContext
from frameloom.studio.markup import data_table, note

_BAD_CLIPS = "bad_clips.jsonl"
_MAX_SHOWN = 200


def show_broken(context: StudioContext, table: ClipTable) -> str:
    rows = [["scan or check", *found] for found in read_broken(table.path).iter_rows()]
    rows += skipped_in_runs(context, table)
    if not rows:
        return note("No broken file is listed: neither beside this manifest nor in a run on it.", kind="good")
    shown = data_table(["found by", "file", "reason", "what was found"], rows[:_MAX_SHOWN])
    more = len(rows) - _MAX_SHOWN
    return shown + (note(f"And {more:,} more.") if more > 0 else "")


def skipped_in_runs(context: StudioContext, table: ClipTable) -> list[list[str]]:
    """(run, file, reason, what was found) of every clip that a run on this manifest left out."""
    found = []
    for listed in context.find_files(_BAD_CLIPS):
        run = listed.parent
        if listed.name != _BAD_CLIPS or not _trains_on(context, run / "recipe.yaml", table):
            continue
        for clip in dict.fromkeys((bad.row, bad.reason) for bad in read_bad_clips(listed, repair=False)):
            row, reason = clip
            path = table.table["path"][row] if 0 <= row < table.table.height else f"row {row}"
            found.append([context.name_of(run), str(path), "skipped while training", reason])
    return found


def _trains_on(context: StudioContext, recipe: Path, table: ClipTable) -> bool:
    try:
        manifest = resolve(recipe).get("data", {}).get("manifest")
    except FrameloomError:  # a run whose recipe cannot be read is told about under Runs
        return False
    return isinstance(manifest, str) and (context.root / manifest).resolve() == table.path
