"""Pieces of HTML for the page; everything from outside is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_MAX_BARS = 40


def safe(text: object) -> str:
    """Text for HTML that also passes through a template unchanged: braces and dollar signs mean something there."""
    return escape(str(text)).replace("{", "&#123;").replace("}", "&#125;").replace("$", "&#36;").replace("`", "&#96;")


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
