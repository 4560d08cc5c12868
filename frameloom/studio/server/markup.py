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
    """A line of words; `kind` is quiet, good or bad."""
    role = ' role="alert"' if kind == "bad" else ""
    return f'<p class="fl-note fl-{kind}"{role}>{safe(text)}</p>'


def problem_list(problems: Sequence[str]) -> str:
    """Everything that is wrong, one line each."""
    items = "".join(f"<li>{safe(problem)}</li>" for problem in problems)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f'<div class="fl-problems" role="alert"><strong>{count}</strong><ul>{items}</ul></div>'


def fact_tiles(facts: Mapping[str, str]) -> str:
    """Numbers with their names below."""
    parts = [f"<div><strong>{safe(value)}</strong><span>{safe(name)}</span></div>" for name, value in facts.items()]
    return f'<div class="fl-tiles">{"".join(parts)}</div>'


def data_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[int] = ()) -> str:
    """A plain table; the columns in `numbers` are set to the right."""
    align = ["fl-number" if place in numbers else "" for place in range(len(header))]
    head = "".join(f'<th scope="col" class="{css}">{safe(name)}</th>' for name, css in zip(header, align, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{css}">{safe(cell)}</td>' for cell, css in zip(row, align, strict=True)) + "</tr>"
        for row in rows
    )
    table = f'<table class="fl-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="fl-scroll">{table}</div>'


def bar_chart(title: str, bars: Sequence[tuple[str, int, str]]) -> str:
    """Horizontal bars of (label, count, words behind the count), the first ones when there are many."""
    highest = max((count for _, count, _ in bars), default=0) or 1
    rows = "".join(
        f'<div class="fl-bar"><span>{safe(label)}</span>'
        f'<i><b style="width:{100 * count / highest:.2f}%"></b></i>'
        f"<span>{count:,}{' ' + safe(words) if words else ''}</span></div>"
        for label, count, words in bars[:_MAX_BARS]
    )
    more = note(f"And {len(bars) - _MAX_BARS:,} more.") if len(bars) > _MAX_BARS else ""
    return f'<div class="fl-bars" role="img" aria-label="{safe(title)}">{rows}</div>{more}'


# Clicks on buttons inside our HTML are sent with what they do and to what; other clicks are not sent.
BUTTONS_SCRIPT = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-act]');
  if (button) { trigger('click', {act: button.dataset.act, key: button.dataset.key}); }
});
"""


def player(context: StudioContext, path: Path, caption: str) -> str:
    """A clip that plays or a picture, with a caption to hear; a file that has just gone is told."""
    try:
        url = safe(context.file_url(path))
    except (OSError, FrameloomError):
        return '<p class="rg-empty">the file is gone</p>'
    if path.suffix.lower() not in CLIPS:
        return f'<img loading="lazy" src="{url}" alt="{safe(caption)}">'
    # The address stands on the player itself: the page changes elements in place, and a new <source> is not loaded.
    return (
        f'<video src="{url}" autoplay loop muted playsinline controls preload="metadata" '
        f'aria-label="{safe(caption)}"></video>'
    )


def link(context: StudioContext, path: Path, label: str = "Download") -> str:
    url = safe(context.file_url(path))
    return f'<a class="rg-link" href="{url}" download="{safe(path.name)}">{safe(label)}</a>'


def badge(state: str) -> str:
    return f'<span class="rg-badge rg-{safe(state)}">{safe(state)}</span>'


def button(act: str, key: object, label: str, *, hint: str = "") -> str:
    told = safe(hint or label)
    return (
        f'<button type="button" class="rg-button" data-act="{safe(act)}" data-key="{safe(key)}" '
        f'aria-label="{told}" title="{told}">{safe(label)}</button>'
    )


def bar(done: int, total: int) -> str:
    share = 0 if total <= 0 else min(100, round(100 * done / total))
    return (
        f'<span class="rg-bar" role="progressbar" aria-valuenow="{share}" aria-valuemin="0" aria-valuemax="100">'
        f'<i style="width:{share}%"></i></span>'
    )


def status(text: str) -> str:
    """A sentence about what has just happened."""
    return f'<p class="rg-note" role="status">{safe(text)}</p>' if text else ""


def format_time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


STYLE = """
.rg-empty { color: var(--body-text-color-subdued); margin: 4px 0; }
.rg-scroll { overflow-x: auto; }
.rg-table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
.rg-table th { text-align: left; font-weight: 500; color: var(--body-text-color-subdued); padding: 4px 14px 6px 0; }
.rg-table td { padding: 7px 14px 7px 0; border-top: 1px solid var(--border-color-primary); vertical-align: middle; }
.rg-table td.rg-name { font-weight: 600; overflow-wrap: anywhere; min-width: 150px; }
.rg-table td.rg-acts { text-align: right; padding-right: 0; white-space: nowrap; }
.rg-table td.rg-step { white-space: nowrap; }
.rg-table small, .rg-soft { color: var(--body-text-color-subdued); font-weight: 400; }
.rg-badge { display: inline-block; padding: 1px 9px; border-radius: 99px; font-size: 12.5px; font-weight: 550;
  border: 1px solid currentColor; white-space: nowrap; }
.rg-running, .rg-loading { color: #3f5fe0; } .rg-finished, .rg-done { color: #197a45; } .rg-failed { color: #c0362c; }
.rg-stopped, .rg-waiting, .rg-cancelled { color: #71717a; }
.dark .rg-running, .dark .rg-loading { color: #9db0ff; } .dark .rg-finished, .dark .rg-done { color: #62d394; }
.dark .rg-failed { color: #ff8f86; } .dark .rg-stopped, .dark .rg-waiting, .dark .rg-cancelled { color: #a1a1aa; }
.gradio-container .rg-button { font: inherit; font-size: 13px; padding: 3px 11px; margin-left: 6px; cursor: pointer;
  border-radius: 7px; border: 1px solid var(--border-color-primary); color: var(--body-text-color);
  background: var(--button-secondary-background-fill); }
.rg-button:hover { border-color: var(--color-accent); }
.rg-button:focus-visible, .rg-link:focus-visible { outline: 2px solid var(--color-accent); outline-offset: 2px; }
.gradio-container .rg-link { font-size: 13px; margin-left: 10px; text-decoration: underline; color: inherit; }
.rg-bar { display: inline-block; width: 90px; height: 5px; border-radius: 3px; overflow: hidden; margin-left: 8px;
  background: var(--border-color-primary); vertical-align: middle; }
.rg-bar i { display: block; height: 100%; background: var(--color-accent); }
.rg-charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 18px 26px; }
.rg-chart { margin: 0; min-width: 0; }
.rg-chart svg { width: 100%; height: auto; display: block; }
.rg-chart svg { fill: var(--body-text-color-subdued); } .rg-chart .dot:hover { opacity: 1; }
.rg-sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 22px; }
.rg-sides h4 { margin: 0 0 8px; font-size: 14px; overflow-wrap: anywhere; }
.rg-clips { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 150px), 1fr)); gap: 14px; }
.rg-wide { grid-template-columns: repeat(auto-fill, minmax(min(100%, 220px), 1fr)); }
.rg-clip { border: 1px solid var(--border-color-primary); border-radius: 10px; overflow: hidden; min-width: 0;
  background: var(--block-background-fill); }
.rg-clip video, .rg-clip img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; background: #000;
  margin: 0; border-radius: 0; }
.rg-clip > div { padding: 8px 10px 10px; font-size: 13px; line-height: 1.4; overflow-wrap: anywhere; }
.rg-clip p { margin: 0 0 4px; max-height: 8.4em; overflow: auto; white-space: pre-wrap; }
.gradio-container .rg-clip .rg-button { margin: 6px 6px 0 0; }
.gradio-container .rg-clip .rg-link { margin: 6px 8px 0 0; display: inline-block; }
.rg-note { margin: 4px 0; overflow-wrap: anywhere; }
.rg-log { max-height: 240px; overflow: auto; font-size: 12px; line-height: 1.45; padding: 10px 12px; margin: 6px 0 14px;
  border-radius: 8px; background: var(--background-fill-secondary); white-space: pre-wrap; overflow-wrap: anywhere; }
.rg-command { display: block; padding: 8px 10px; margin-top: 6px; border-radius: 8px; font-size: 12.5px;
  user-select: all; background: var(--background-fill-secondary); white-space: pre-wrap; overflow-wrap: anywhere; }
.rg-start summary, .rg-more summary { cursor: pointer; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  .rg-table, .rg-table tbody, .rg-table tr, .rg-table td { display: block; width: 100%; }
  .gradio-container .rg-table tr:has(th) { display: none; }
  .rg-table tr { border-top: 1px solid var(--border-color-primary); padding: 8px 0; }
  .gradio-container .rg-table td { border: 0; padding: 2px 0; } .rg-table td:empty { display: none; }
  .rg-table td[data-label]:not(:empty)::before { content: attr(data-label) " "; color: var(--body-text-color-subdued); }
  .gradio-container .rg-table td.rg-acts { text-align: left; } .rg-table .rg-acts > :first-child { margin-left: 0; } }
"""
