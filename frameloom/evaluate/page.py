"""Building blocks of self-contained HTML pages: tables, curves, pictures and videos, embedded in the file.

Text from outside goes through `escape`; nothing is fetched when the page is opened.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c21; --soft: #6b6b76; --line: #dcdce2; --paper: #fbfbfd; --tint: #f0f0f4;
        --accent: #4f6df5; --second: #e0723a; --good: #1d8a4e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececf1; --soft: #9a9aa6; --line: #34343c; --paper: #17171b; --tint: #202026; --accent: #8ea2ff;
          --second: #f0955f; --good: #5fcf8f; } }
body { margin: 0 auto; max-width: 1080px; padding: 40px 24px 80px; background: var(--paper); color: var(--ink);
       font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 30px; margin: 0 0 4px; letter-spacing: -0.01em; } h2 { font-size: 19px; margin: 44px 0 12px; }
p.lead { color: var(--soft); margin: 0 0 24px; max-width: 70ch; } p { max-width: 75ch; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 14px 6px 0; text-align: left; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; } td.number { text-align: right; }
.scroll { overflow-x: auto; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; }
.tile { background: var(--tint); border-radius: 10px; padding: 14px 18px; }
.tile b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.clips { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 16px; }
.clip { background: var(--tint); border-radius: 10px; overflow: hidden; }
.clip video, .clip img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; background: #000; }
.clip p { margin: 0; padding: 8px 10px 10px; font-size: 13px; line-height: 1.35; } .clip small { color: var(--soft); }
.right { color: var(--good); } .wrong { color: var(--second); }
img.sheet { max-width: 100%; border-radius: 10px; } svg { max-width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
"""


def page(title: str, lead: str, sections: Sequence[str]) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f'<body><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>\n'
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(parts)


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def tiles(values: Mapping[str, str]) -> str:
    """Big numbers with a small caption each."""
    cells = [
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in values.items()
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str | float | int]]) -> str:
    """Numbers are set to the right."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: str | float | int) -> str:
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    text = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    return f'<td class="number">{text}</td>'


def picture(path: Path, alt: str) -> str:
    return f'<img class="sheet" alt="{escape(alt)}" src="{_data_uri(path, "image/png")}">'


def clip(path: Path, caption: str, note: str = "", *, is_right: bool | None = None) -> str:
    """A playable video (or a picture, for a png or gif) with its caption below."""
    suffix = path.suffix.lower()
    if suffix in (".png", ".gif"):
        media = f'<img alt="{escape(caption)}" src="{_data_uri(path, f"image/{suffix[1:]}")}">'
    else:
        kind = "video/webm" if suffix == ".webm" else "video/mp4"
        media = f'<video autoplay loop muted playsinline controls src="{_data_uri(path, kind)}"></video>'
    mark = "" if is_right is None else ' class="right"' if is_right else ' class="wrong"'
    return f'<div class="clip">{media}<p>{escape(caption)}<br><small{mark}>{escape(note)}</small></p></div>'


def clip_grid(clips: Sequence[str]) -> str:
    return f'<div class="clips">{"".join(clips)}</div>'


def curve(name: str, points: Sequence[tuple[float, float]], *, is_log: bool = False) -> str:
    """A line chart as SVG: x is the step; the faint line is raw, the strong one a running mean."""
    finite = [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not is_log)]
    if len(finite) < 2:
        return paragraph(f"{name}: too few points for a curve yet.")
    width, height, left, bottom = 500, 240, 56, 28
    scaled = [(x, math.log10(y) if is_log else y) for x, y in finite]
    low, high = min(y for _, y in scaled), max(y for _, y in scaled)
    last, spread = scaled[-1][0], (high - low) or 1.0

    def place(x: float, y: float) -> str:
        return f"{left + x / last * (width - left - 12):.1f},{12 + (high - y) / spread * (height - bottom - 20):.1f}"

    raw = " ".join(place(x, y) for x, y in scaled)
    mean = " ".join(place(x, y) for x, y in _running_mean(scaled))
    marks = "".join(_mark(low + spread * share, is_log, place, left) for share in (0.0, 0.5, 1.0))
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(name)}">{marks}'
        f'<polyline points="{raw}" fill="none" stroke="var(--accent)" stroke-opacity="0.3"/>'
        f'<polyline points="{mean}" fill="none" stroke="var(--accent)" stroke-width="2"/>'
        f'<text x="{width - 12}" y="{height - 6}" text-anchor="end">step {int(last):,}</text>'
        f'<text x="{left}" y="{height - 6}">{escape(name)}</text></svg>'
    )


def _mark(value: float, is_log: bool, place: object, left: int) -> str:
    assert callable(place)
    y = place(0.0, value).split(",")[1]
    text = f"{10**value if is_log else value:.3g}"
    return (
        f'<line x1="{left}" x2="488" y1="{y}" y2="{y}" stroke="var(--line)"/>'
        f'<text x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _running_mean(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    window = max(1, len(points) // 25)
    return [
        (
            points[i][0],
            sum(y for _, y in points[max(0, i - window + 1) : i + 1]) / len(points[max(0, i - window + 1) : i + 1]),
        )
        for i in range(len(points))
    ]


def _data_uri(path: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
