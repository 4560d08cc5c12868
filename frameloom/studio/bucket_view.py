"""How the clips of a manifest spread: over the buckets of a recipe, or over the shapes they have themselves."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from frameloom.config.load import load_recipe
from frameloom.data.buckets import assign, bucket_table, count_unused
from frameloom.data.manifest import Manifest
from frameloom.studio.clip_table import ClipTable
from frameloom.studio.markup import bar_chart, note


def show_shapes(table: ClipTable) -> str:
    """Clips by width, height and number of frames, the most frequent first."""
    counts = table.table.group_by("width", "height", "frames").len().sort("len", "width", descending=[True, False])
    bars = [(_name_shape(*shape), count, "") for *shape, count in counts.iter_rows()]
    return bar_chart("clips by shape", bars)


def _name_shape(width: int | None, height: int | None, frames: int | None) -> str:
    if width is None or height is None:
        return "not scanned"
    return f"{width}x{height}" + (f", {frames} frames" if frames and frames > 1 else "")


def show_buckets(table: ClipTable, recipe: str | Path) -> str:
    """The buckets that a recipe puts the clips in, as `frameloom data report` counts them."""
    # The trainer brings the models along; a page that shows no buckets starts without them.
    from frameloom.train.data_parts import build_policy

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
