"""Charts of the curves of several runs as SVG without scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from frameloom.studio.server.markup import safe

# Apart for eyes of most kinds, on light and on dark paper.
COLOURS = ("#4f6df5", "#e0723a", "#1d9a6c", "#b04fd0", "#c79a1e", "#2b9bc9")
_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 30
_MAX_POINTS = 400
_MAX_DOTS = 48
_MIN_SMOOTHED = 20

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One run's metric: (step, value) in the order of the steps."""

    label: str
    points: Sequence[Point]
    colour: str


def smooth(points: Sequence[Point], strength: float) -> list[Point]:
    """A running mean that forgets: 0 changes nothing, towards 1 ever slower. Fair at the start (no pull to zero)."""
    if strength <= 0:
        return list(points)
    mean = weight = 0.0
    result = []
    for step, value in points:
        mean = strength * mean + (1 - strength) * value
        weight = strength * weight + (1 - strength)
        result.append((step, mean / weight))
    return result


def thin(points: Sequence[Point], max_points: int = _MAX_POINTS) -> list[Point]:
    """At most so many points; of each stretch the lowest and the highest stay, so that no spike is lost."""
    if len(points) <= max_points:
        return list(points)
    kept = [points[0]]
    num_stretches = max(1, (max_points - 2) // 2)
    inner = len(points) - 2
    for number in range(num_stretches):
        stretch = points[1 + number * inner // num_stretches : 1 + (number + 1) * inner // num_stretches]
        if stretch:
            ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
            kept += sorted(ends)
    return [*kept, points[-1]]


def draw_chart(title: str, lines: Sequence[Line], *, strength: float = 0.0, is_log: bool = False) -> str:
    """A figure with its title, the curves, and a legend with the last values."""
    usable = [Line(line.label, _usable(line.points, is_log), line.colour) for line in lines]
    usable = [line for line in usable if line.points]
    num_points = sum(len(line.points) for line in usable)
    body = _draw_svg(title, usable, strength, is_log) if usable else '<p class="rg-empty">nothing logged yet</p>'
    return (
        f'<figure class="rg-chart" data-points="{num_points}"><figcaption>{safe(title)}</figcaption>'
        f"{body}{_draw_legend(usable)}</figure>"
    )


def _usable(points: Sequence[Point], is_log: bool) -> list[Point]:
    return [(step, value) for step, value in points if math.isfinite(value) and (value > 0 or not is_log)]


def _draw_legend(lines: Sequence[Line]) -> str:
    items = [
        f'<li><i style="background:{line.colour}"></i>{safe(line.label)} <b>{format_value(line.points[-1][1])}</b></li>'
        for line in lines
    ]
    return f'<ul class="rg-legend">{"".join(items)}</ul>'


def _draw_svg(title: str, lines: Sequence[Line], strength: float, is_log: bool) -> str:
    scale: Callable[[float], float] = math.log10 if is_log else float
    # A curve of a few records has no noise to smooth away.
    strengths = [strength if len(line.points) > _MIN_SMOOTHED else 0.0 for line in lines]
    smoothed = [smooth(line.points, one) for line, one in zip(lines, strengths, strict=True)]
    values = [scale(value) for line in lines for _, value in line.points]
    steps = [step for line in lines for step, _ in line.points]
    low, high = min(values), max(values)
    if high == low:
        low, high = low - abs(low) / 2 - 0.5 * (low == 0), high + abs(high) / 2 + 0.5 * (high == 0)
    first, last = min(steps), max(steps)

    def place(step: float, value: float) -> tuple[float, float]:
        across = (step - first) / ((last - first) or 1)
        up = (scale(value) - low) / (high - low)
        return (
            round(_LEFT + across * (_WIDTH - _LEFT - _RIGHT), 1),
            round(_HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM), 1),
        )

    parts = [_draw_grid(ticks(low, high, is_log), place, first)]
    parts.append(_draw_steps(first, last))
    for line, means, one in zip(lines, smoothed, strengths, strict=True):
        if one > 0:
            parts.append(_draw_line(line.points, line.colour, place, opacity=0.25, width=1))
        parts.append(_draw_line(means, line.colour, place, opacity=1, width=2))
        parts.append(_draw_dots(means, line, place))
    label = safe(f"{title}: {', '.join(line.label for line in lines)}")
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


Place = Callable[[float, float], tuple[float, float]]


def _draw_grid(marks: Sequence[float], place: Place, first: float) -> str:
    parts = []
    for mark in marks:
        _, y = place(first, mark)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" class="rg-grid"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_value(mark)}</text>'
        )
    return "".join(parts)


def _draw_steps(first: float, last: float) -> str:
    y = _HEIGHT - 8
    return (
        f'<text x="{_LEFT}" y="{y}">step {first:,.0f}</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="{y}" text-anchor="end">step {last:,.0f}</text>'
    )


def _draw_line(points: Sequence[Point], colour: str, place: Place, *, opacity: float, width: int) -> str:
    path = " ".join("{},{}".format(*place(*point)) for point in thin(points))
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-opacity="{opacity}" stroke-width="{width}" '
        'stroke-linejoin="round"/>'
    )


def _draw_dots(points: Sequence[Point], line: Line, place: Place) -> str:
    """Places to point at: each tells its step and value. A single record would be no line at all, so dots show."""
    shown = points[:: max(1, -(-len(points) // _MAX_DOTS))]
    if shown[-1] != points[-1]:
        shown = [*shown, points[-1]]
    kind = "rg-dot rg-seen" if len(points) <= _MIN_SMOOTHED else "rg-dot"
    parts = []
    for step, value in shown:
        x, y = place(step, value)
        told = safe(f"{line.label}\nstep {step:,.0f}: {format_value(value)}")
        parts.append(
            f'<circle class="{kind}" cx="{x}" cy="{y}" r="3" fill="{line.colour}"><title>{told}</title></circle>'
        )
    return "".join(parts)


def ticks(low: float, high: float, is_log: bool) -> list[float]:
    """About four round values in the range; of a logarithmic one (given as powers) values in their own scale."""
    if is_log:
        wanted = [10.0**power * factor for power in range(math.floor(low), math.ceil(high) + 1) for factor in (1, 2, 5)]
        inside = [value for value in wanted if low <= math.log10(value) <= high]
        return inside[:: max(1, -(-len(inside) // 5))] or [10**low, 10**high]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def format_value(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e+")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
