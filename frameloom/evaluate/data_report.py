"""HTML report of a dataset: totals, histograms, buckets, sample pictures and broken files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from frameloom.core.files import write_text
from frameloom.data.buckets.policy import BucketUse
from frameloom.data.curation.report import Bar, SetFacts, Thumb
from frameloom.evaluate.page import clip_grid, page, paragraph, section, table, tiles

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 500, 200, 12, 40, 24
_MAX_LABELS = 8


def write_data_report(
    facts: SetFacts, out: Path, *, buckets: Sequence[BucketUse] | None = None, unused: dict[str, int] | None = None
) -> None:
    """Write the page; `buckets` and `unused` come from a recipe."""
    sections = [tiles(facts.totals), *(paragraph(note) for note in facts.notes)]
    if facts.histograms:
        charts = "".join(histogram(name, bars) for name, bars in facts.histograms.items())
        sections.append(section("Sizes and lengths", f'<div class="tiles">{charts}</div>'))
    if buckets is not None:
        sections.append(_show_buckets(buckets, unused or {}))
    if facts.thumbs:
        sections.append(section("A sample", clip_grid([thumb_card(thumb) for thumb in facts.thumbs])))
    if any(facts.longest_captions):
        longest = [[f"{len(text):,}", text] for text in facts.longest_captions if text]
        sections.append(section("Longest captions", table(["characters", "caption"], longest)))
    sections.append(_show_broken(facts))
    lead = "What is in the set, how it spreads over sizes and lengths, and which files cannot be used."
    write_text(out, page(facts.title, lead, sections))


def _show_buckets(buckets: Sequence[BucketUse], unused: dict[str, int]) -> str:
    rows = [_bucket_row(use) for use in buckets]
    header = ["bucket", "pixels", "frames", "clips", "batch size", "batches"]
    left = ", ".join(f"{count:,} {reason}" for reason, count in unused.items() if count)
    note = paragraph(f"Not used in the first epoch: {left}." if left else "Every clip has a bucket.")
    return section("Buckets of the first epoch", table(header, rows), note)


def _bucket_row(use: BucketUse) -> list[str | float | int]:
    bucket = use.bucket
    size = f"{bucket.width}x{bucket.height}"
    return [bucket.name, size, bucket.frames, use.num_clips, bucket.batch_size, use.num_batches]


def _show_broken(facts: SetFacts) -> str:
    if not facts.num_broken:
        return section("Broken files", paragraph("None are listed beside this manifest."))
    counts = table(["reason", "files"], [[bar.label, bar.num_files] for bar in facts.broken_counts])
    rows = [[item.path, item.reason, item.detail or ""] for item in facts.broken]
    shown = table(["path", "reason", "what was found"], rows)
    more = facts.num_broken - len(facts.broken)
    return section("Broken files", counts, "<br>", shown, paragraph(f"And {more:,} more.") if more else "")


def thumb_card(thumb: Thumb) -> str:
    """A picture with its caption, path and size; the error instead of the picture when there is none."""
    if thumb.jpeg is None:
        media, note = "", f'<small class="wrong">{escape(thumb.note)}</small>'
    else:
        data = base64.b64encode(thumb.jpeg).decode()
        media = f'<img alt="{escape(thumb.caption or thumb.path)}" src="data:image/jpeg;base64,{data}">'
        note = f"<small>{escape(thumb.note)}</small>"
    return (
        f'<div class="clip">{media}<p>{escape(thumb.caption)}<br>'
        f"<small>{escape(thumb.path)}</small><br>{note}</p></div>"
    )


def histogram(name: str, bars: Sequence[Bar]) -> str:
    """Bars as inline SVG; each tells its count when pointed at."""
    highest = max((bar.num_files for bar in bars), default=0) or 1
    step = (_WIDTH - 2 * _LEFT) / max(len(bars), 1)
    every = -(-len(bars) // _MAX_LABELS)
    parts = []
    for number, bar in enumerate(bars):
        height = bar.num_files / highest * (_HEIGHT - _BOTTOM - _TOP)
        left, top = _LEFT + number * step, _HEIGHT - _BOTTOM - height
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(step - 2, 1):.1f}" height="{height:.1f}" '
            f'fill="var(--accent)"><title>{escape(bar.label)}: {bar.num_files:,}</title></rect>'
        )
        if number % every == 0:
            middle = left + step / 2
            parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{escape(bar.label)}</text>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{escape(name)}">'
        f'<line x1="{_LEFT}" x2="{_WIDTH - _LEFT}" y1="{_HEIGHT - _BOTTOM}" y2="{_HEIGHT - _BOTTOM}" '
        f'stroke="var(--line)"/>{"".join(parts)}<text x="{_LEFT}" y="14">{escape(name)}</text>'
        f'<text x="{_WIDTH - _LEFT}" y="14" text-anchor="end">highest: {highest:,}</text></svg>'
    )
