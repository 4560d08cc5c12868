"""A page of clips and one chosen clip as HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frameloom.core.errors import DataError
from frameloom.studio.clip_media import ClipMedia
from frameloom.studio.clip_table import PAGE_ROWS, ClipTable, Page
from frameloom.studio.markup import note, safe

_HIDDEN = {"caption", "captions", "__row", "row"}
_MAX_CELL = 300


def show_page(table: ClipTable, page: Page, media: ClipMedia, edits: Mapping[int, str], chosen: int | None) -> str:
    """The rows of a page as a table; each has a button that chooses it."""
    if not page.num_rows:
        return note("No clip fits these filters.")
    rows = "".join(_show_row(table, row, media, edits, chosen) for row in page.rows.iter_rows(named=True))
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Clip", "Caption", "Size", "Frames", "fps"))
    return f'<table class="fl-clips"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _show_row(
    table: ClipTable, row: Mapping[str, Any], media: ClipMedia, edits: Mapping[int, str], chosen: int | None
) -> str:
    number = int(row["row"])
    caption = edits.get(number, row["caption"] or "")
    marks = ("fl-chosen " if number == chosen else "") + ("fl-edited" if number in edits else "")
    picture = f'<img loading="lazy" alt="" src="{media.thumb_url(table, number)}">'
    return (
        f'<tr data-row="{number}" class="{marks.strip()}">'
        f'<td><button type="button" aria-label="Show {safe(row["path"])}">{picture}</button></td>'
        f'<td><span class="fl-caption">{safe(_cut(caption)) or "<em>no caption</em>"}</span>'
        f'<span class="fl-path">{safe(row["path"])}</span></td>'
        f"<td>{_size(row)}</td><td>{_number(row['frames'])}</td><td>{_number(row['fps'])}</td></tr>"
    )


def describe_page(page: Page) -> str:
    """Where the page stands among all rows."""
    first = page.number * PAGE_ROWS
    last = first + page.rows.height
    words = f"{first + 1:,} to {last:,} of {page.num_rows:,}" if page.num_rows else "0 clips"
    return f'<p class="fl-pager" role="status">{words}</p>'


def show_clip(table: ClipTable, row: int, media: ClipMedia) -> str:
    """The player of one clip; words instead of it when it cannot be shown."""
    facts = table.row(row)
    try:
        url, is_video = media.play_url(table, row)
        tag = (
            f'<video src="{safe(url)}" controls loop muted autoplay playsinline preload="auto"></video>'
            if is_video
            else f'<img src="{safe(url)}" alt="{safe(_cut(facts["caption"] or facts["path"]))}">'
        )
    except DataError as error:
        tag = note(str(error), kind="bad")
    return f'<div class="fl-player">{tag}</div>'


def show_facts(table: ClipTable, row: int) -> str:
    """Everything the manifest says about one clip."""
    facts = table.row(row)
    others = {name: value for name, value in facts.items() if name not in _HIDDEN and value is not None}
    listed = "".join(f"<dt>{safe(name)}</dt><dd>{safe(_cut(value))}</dd>" for name, value in others.items())
    return f'<dl class="fl-facts"><dt>row</dt><dd>{row:,}</dd>{listed}</dl>'


def _size(row: Mapping[str, Any]) -> str:
    return "-" if row["width"] is None or row["height"] is None else f"{row['width']}x{row['height']}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _cut(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}…"
