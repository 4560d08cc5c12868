"""HTML fragments for the page; all text from outside is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from frameloom.core.errors import FrameloomError
from frameloom.evaluate.charts import safe as safe
from frameloom.studio.runs.samples import CLIPS

if TYPE_CHECKING:
    from frameloom.studio.server.context import StudioContext

_MAX_BARS = 40


def note(text: str, *, kind: str = "quiet") -> str:
    """A line of text; `kind` is quiet, good, bad or status (the result of the last action)."""
    role = {"bad": ' role="alert"', "status": ' role="status"'}.get(kind, "")
    return f'<p class="fl-note fl-{kind}"{role}>{safe(text)}</p>'


def problem_list(found: FrameloomError | Sequence[str]) -> str:
    """All problems, one line each."""
    problems = getattr(found, "problems", str(found).splitlines()) if isinstance(found, FrameloomError) else found
    items = "".join(f"<li>{safe(problem)}</li>" for problem in problems)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f'<div class="fl-problems" role="alert"><strong>{count}</strong><ul>{items}</ul></div>'


def fact_tiles(facts: Mapping[str, str]) -> str:
    """Numbers with their names below."""
    parts = [f"<div><strong>{safe(value)}</strong><span>{safe(name)}</span></div>" for name, value in facts.items()]
    return f'<div class="fl-tiles">{"".join(parts)}</div>'


def data_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[int] = ()) -> str:
    """A plain table; the columns in `numbers` are set to the right."""
    align = ["fl-number" if column in numbers else "" for column in range(len(header))]
    head = "".join(f'<th scope="col" class="{css}">{safe(name)}</th>' for name, css in zip(header, align, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{css}">{safe(cell)}</td>' for cell, css in zip(row, align, strict=True)) + "</tr>"
        for row in rows
    )
    table = f'<table class="fl-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="fl-scroll">{table}</div>'


def bar_chart(title: str, bars: Sequence[tuple[str, int, str]]) -> str:
    """Horizontal bars of (label, count, text behind the count), at most the first 40."""
    highest = max((count for _, count, _ in bars), default=0) or 1
    rows = "".join(
        f'<div class="fl-bar"><span>{safe(label)}</span>'
        f'<i><b style="width:{100 * count / highest:.2f}%"></b></i>'
        f"<span>{count:,}{' ' + safe(words) if words else ''}</span></div>"
        for label, count, words in bars[:_MAX_BARS]
    )
    more = note(f"And {len(bars) - _MAX_BARS:,} more.") if len(bars) > _MAX_BARS else ""
    return f'<div class="fl-bars" role="img" aria-label="{safe(title)}">{rows}</div>{more}'


# Sends clicks on buttons in this HTML with their action and key; ignores other clicks.
BUTTONS_SCRIPT = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-act]');
  if (button) { trigger('click', {act: button.dataset.act, key: button.dataset.key}); }
});
"""


def player(context: StudioContext, path: Path, caption: str) -> str:
    """A clip that plays, or a picture, with a caption for screen readers; or a note that the file was deleted."""
    try:
        url = safe(context.file_url(path))
    except (OSError, FrameloomError):
        return '<p class="rg-empty">the file was deleted</p>'
    if path.suffix.lower() not in CLIPS:
        return f'<img loading="lazy" src="{url}" alt="{safe(caption)}">'
    # The address is on the player itself: the page changes elements in place, and a new <source> is not loaded.
    return (
        f'<video src="{url}" autoplay loop muted playsinline controls preload="metadata" '
        f'aria-label="{safe(caption)}"></video>'
    )


def link(context: StudioContext, path: Path, label: str = "Download") -> str:
    url = safe(context.file_url(path))
    return f'<a class="rg-link" href="{url}" download="{safe(path.name)}">{safe(label)}</a>'


def badge(state: str, label: str = "") -> str:
    return f'<span class="rg-badge rg-{safe(state)}">{safe(label or state)}</span>'


def button(act: str, key: object, label: str, *, hint: str = "") -> str:
    title = safe(hint or label)
    return (
        f'<button type="button" class="rg-button" data-act="{safe(act)}" data-key="{safe(key)}" '
        f'aria-label="{title}" title="{title}">{safe(label)}</button>'
    )


def bar(done: int, total: int) -> str:
    share = 0 if total <= 0 else min(100, round(100 * done / total))
    return (
        f'<span class="rg-bar" role="progressbar" aria-valuenow="{share}" aria-valuemin="0" aria-valuemax="100">'
        f'<i style="width:{share}%"></i></span>'
    )


def format_time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
