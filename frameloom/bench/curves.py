"""Curves with logarithmic axes as an SVG file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from frameloom.bench.table import format_value

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 700, 320, 76, 260, 34, 40
# Seen well on white and on black paper.
_COLOURS = ("#4f6df5", "#e0723a", "#1d8a4e", "#a04fd0", "#c0a020", "#888896", "#20a0a8", "#d04f7a")


@dataclass(frozen=True)
class Line:
    """Points in the order they are joined; lines of others are dashed."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_ours: bool = True


@dataclass(frozen=True)
class _Scale:
    """From a positive number to a place between two ends."""

    low: float
    high: float
    start: float
    stop: float

    def place(self, value: float) -> float:
        span = math.log10(self.high) - math.log10(self.low) or 1.0
        return self.start + (math.log10(value) - math.log10(self.low)) / span * (self.stop - self.start)


def draw_curves(title: str, lines: Sequence[Line], *, axis: str, unit: str) -> str:
    """All numbers must be above 0."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    across = _Scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    up = _Scale(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="11" fill="#777780">',
        f'<text x="{_LEFT}" y="16" font-size="13">{escape(title)}</text>',
        *(_mark_up(up, value, unit) for value in _marks(up)),
        *(_mark_across(across, value) for value in sorted(set(xs))),
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{escape(axis)}</text>',
        *(_draw_line(line, number, across, up) for number, line in enumerate(lines)),
    ]
    return "\n".join([*parts, "</svg>\n"])


def _marks(scale: _Scale) -> list[float]:
    """The ends, and the powers of ten between them that are not too near."""
    powers = range(math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high)) + 1)
    inner = [10.0**power for power in powers]
    gap = 14
    kept = [
        value
        for value in inner
        if all(abs(scale.place(value) - scale.place(end)) > gap for end in (scale.low, scale.high))
    ]
    return [scale.low, *kept, scale.high] if scale.low < scale.high else [scale.low]


def _mark_up(scale: _Scale, value: float, unit: str) -> str:
    y = scale.place(value)
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888896" stroke-opacity="0.25"/>'
        f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(format_value(value, unit))}</text>'
    )


def _mark_across(scale: _Scale, value: float) -> str:
    x = scale.place(value)
    return f'<text x="{x:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{value:,.0f}</text>'


def _draw_line(line: Line, number: int, across: _Scale, up: _Scale) -> str:
    colour, y = _COLOURS[number % len(_COLOURS)], _TOP + 6 + 18 * number
    points = [(across.place(x), up.place(y)) for x, y in sorted(line.points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = "" if line.is_ours else ' stroke-dasharray="5 4"'
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
    left = _WIDTH - _RIGHT + 14
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>{dots}'
        f'<line x1="{left}" x2="{left + 20}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"{dash}/>'
        f'<text x="{left + 26}" y="{y + 4}">{escape(line.name)}</text>'
    )
