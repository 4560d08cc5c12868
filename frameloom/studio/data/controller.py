"""Event handlers of the Data tab."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from frameloom.config.loading.recipe import load_recipe, resolve
from frameloom.core.errors import DataError, FrameloomError
from frameloom.data.buckets.policy import assign, bucket_table, count_unused
from frameloom.data.curation.report import read_broken
from frameloom.data.loading.bad_clips import read_bad_clips
from frameloom.data.manifest.manifest import Manifest
from frameloom.studio.data.clip_table import (
    MAX_EDITS,
    ClipFilter,
    ClipTable,
    free_name,
    write_edited,
)
from frameloom.studio.data.clips import ClipMedia, describe_page, show_clip, show_facts, show_page
from frameloom.studio.recipe.files import find_recipe_file
from frameloom.studio.server.context import StudioContext
from frameloom.studio.server.markup import bar_chart, data_table, fact_tiles, note

OWN_SHAPES = "the clips' own shapes"
_HOW_TO_SCAN = "`frameloom data scan clips/ --out clips/manifest.parquet`"
_MAX_CHARS = 10_000
Edits = dict[int, str]
"""New captions that are not written yet, by row."""


class DataController:
    """Everything behind the tab; the edits of a visitor travel with their page."""

    def __init__(self, context: StudioContext) -> None:
        self.context = context
        self.media = ClipMedia(context)

    def open(self, name: str) -> ClipTable:
        path = self.context.resolve(name, where="manifest")
        if not path.is_file():
            raise DataError(f"{name}: no such manifest; press Refresh")
        return self.media.open(path)

    def summarize(self, name: str | None) -> tuple[str, str, str]:
        """(totals, broken files, a name for the next manifest)."""
        if not name:
            return note(f"No manifest in this folder yet; create one with {_HOW_TO_SCAN}."), "", ""
        table = self.open(name)
        return fact_tiles(count_totals(table.table)), show_broken(self.context, table), free_name(table.path)

    def group(self, name: str | None, policy: str) -> str:
        if not name:
            return ""
        table = self.open(name)
        return (
            show_shapes(table) if policy == OWN_SHAPES else show_buckets(table, find_recipe_file(self.context, policy))
        )

    def show(
        self,
        name: str | None,
        number: int,
        edits: Mapping[int, str],
        chosen: int | None,
        *filters: Any,
        turn: int | None = 0,
    ) -> tuple[str, str, int]:
        """(the table, which rows it has, the number of the page); `turn` pages on, None to the first page.

        `filters` are text, kind, two bounds each of frames, side and fps, and an expression.
        """
        if not name:
            return "", "", 0
        table = self.open(name)
        text, kind, *bounds, where = filters
        wanted = ClipFilter(text or "", kind, tuple(bounds[:2]), tuple(bounds[2:4]), tuple(bounds[4:]), where or "")
        page = table.page(wanted, 0 if turn is None else number + turn)
        return show_page(table, page, edits, chosen), describe_page(page), page.number

    def choose(self, name: str, edits: Mapping[int, str], row: int) -> tuple[str, str, str, int]:
        """(the player, the caption, the facts, the row)."""
        table = self.open(name)
        caption = edits.get(row, table.row(row)["caption"] or "")
        return show_clip(table, row, self.media), caption, show_facts(table, row), row

    def edit(self, name: str | None, row: int | None, text: str, edits: Edits) -> tuple[Edits, str]:
        """The edits with one more, and how many they are; a caption that is as it was is no edit."""
        if not name or row is None:
            raise DataError("no clip is chosen; choose one in the table first")
        caption, table = text.strip(), self.open(name)
        if len(caption) > _MAX_CHARS:
            raise DataError(f"the caption has {len(caption):,} characters; at most {_MAX_CHARS:,} are kept, shorten it")
        changed = {known: words for known, words in edits.items() if known != row}
        if caption != (table.row(row)["caption"] or ""):
            if len(changed) >= MAX_EDITS:
                raise DataError(f"{MAX_EDITS:,} changed captions are the maximum; write them to a manifest first")
            changed[row] = caption
        return changed, describe_edits(changed)

    def write(self, name: str | None, edits: Edits, target: str) -> str:
        """Write the new manifest; its name relative to the root."""
        if not name:
            raise DataError("no manifest is chosen; pick one first")
        return self.context.name_of(write_edited(self.open(name), edits, target))


def describe_edits(edits: Edits) -> str:
    if not edits:
        return note("No caption is changed.")
    return note(f"{len(edits):,} caption{'s' if len(edits) > 1 else ''} changed, not written yet.", kind="good")


_BAD_CLIPS = "bad_clips.jsonl"
_MAX_SHOWN = 200


def show_broken(context: StudioContext, table: ClipTable) -> str:
    """Clips that scan or check found broken, and those that a run on this manifest skipped."""
    rows = [["scan or check", *found] for found in read_broken(table.path).iter_rows()]
    for listed in context.find_files(_BAD_CLIPS):
        run = listed.parent
        try:
            manifest = resolve(run / "recipe.yaml").get("data", {}).get("manifest")
        except FrameloomError:  # Runs shows a recipe that cannot be read
            continue
        is_own = isinstance(manifest, str) and (context.root / manifest).resolve() == table.path
        if listed.name != _BAD_CLIPS or not is_own:
            continue
        for row, reason in dict.fromkeys((bad.row, bad.reason) for bad in read_bad_clips(listed, repair=False)):
            path = table.table["path"][row] if 0 <= row < table.table.height else f"row {row}"
            rows.append([context.name_of(run), str(path), "skipped while training", reason])
    if not rows:
        return note("No broken files: none beside this manifest, none in a run on it.", kind="good")
    shown = data_table(["found by", "file", "reason", "details"], rows[:_MAX_SHOWN])
    more = len(rows) - _MAX_SHOWN
    return shown + (note(f"And {more:,} more.") if more > 0 else "")


def show_shapes(table: ClipTable) -> str:
    """Clips by width, height and number of frames, the most frequent first."""
    counts = table.table.group_by("width", "height", "frames").len().sort("len", "width", descending=[True, False])
    bars = []
    for width, height, frames, count in counts.iter_rows():
        length = f", {frames} frames" if frames and frames > 1 else ""
        bars.append(("not scanned" if width is None or height is None else f"{width}x{height}{length}", count, ""))
    return bar_chart("clips by shape", bars)


def show_buckets(table: ClipTable, recipe: str | Path) -> str:
    """The buckets that a recipe puts the clips in, as `frameloom data report` counts them."""
    # The builders import the models; the page starts faster without them.
    from frameloom.builders.data import build_policy

    loaded = load_recipe(recipe)
    rows = Manifest.read(table.path, root=table.source.root, where=loaded.data.where)
    policy = build_policy(loaded)
    assignment = assign(rows, policy, loaded.seed, 0)
    bars = [
        (
            f"{use.bucket.name} · {use.bucket.width}x{use.bucket.height}",
            use.num_clips,
            f"in {use.num_batches:,} batches",
        )
        for use in bucket_table(assignment, policy)
    ]
    unused = [f"{count:,} {reason}" for reason, count in count_unused(rows, policy, assignment).items() if count]
    words = f"Not used in the first epoch: {', '.join(unused)}." if unused else "Every clip has a bucket."
    return bar_chart("clips by bucket", bars) + note(words)


def count_totals(table: pl.DataFrame) -> dict[str, str]:
    """Numbers at the top of the page."""
    kinds = dict(table["kind"].fill_null("unknown").value_counts().iter_rows())
    seconds = (table["frames"] / table["fps"]).filter(table["kind"] == "video").fill_nan(None).sum() or 0
    empty = int((table["caption"].fill_null("").str.strip_chars() == "").sum())
    totals = {
        "rows": f"{table.height:,}",
        "videos": f"{kinds.get('video', 0):,}",
        "images": f"{kinds.get('image', 0):,}",
    }
    totals["of video"] = f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:,.1f} min"
    if empty:
        totals["without caption"] = f"{empty:,}"
    return totals
