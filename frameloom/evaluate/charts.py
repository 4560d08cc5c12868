"""Line charts and histograms as SVG without scripts; all text from outside is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain

# Apart for eyes of most kinds, on light and on dark paper.
COLOURS = ("#4f6df5", "#e0723a", "#1d9a6c", "#b04fd0", "#c79a1e", "#2b9bc9")
_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM, _LEGEND_PX = 58, 14, 28, 30, 20
_MAX_POINTS = 400
_MAX_DOTS = 48
_MIN_SMOOTHED = 20
_MAX_LABELS = 8

Point = tuple[float, float]


def safe(text: object) -> str:
    """Text for HTML that also passes through a template unchanged: braces and dollar signs mean something there."""
    return escape(str(text)).replace("{", "&#123;").replace("}", "&#125;").replace("$", "&#36;").replace("`", "&#96;")


def format_value(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e+")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Line:
    """A curve, its points in the order of x. Without a colour it gets the one of its number."""

    label: str
    points: Sequence[Point]
    colour: str = ""
    is_dashed: bool = False


@dataclass(frozen=True)
class Axis:
    name: str = ""
    is_log: bool = False
    from_zero: bool = False
    format: Callable[[float], str] = format_value

    def can_show(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.is_log)


STEPS, VALUES = Axis("step", format="{:,.0f}".format), Axis()


@dataclass(frozen=True)
class _Scale:
    """From the values of an axis to pixels between `start` and `stop`; `low` and `high` are powers of a log axis."""

    axis: Axis
    low: float
    high: float
    start: float
    stop: float

    @classmethod
    def fit(cls, axis: Axis, values: Sequence[float], start: float, stop: float) -> _Scale:
        scaled = [math.log10(value) if axis.is_log else value for value in values]
        low, high = 0.0 if axis.from_zero else min(scaled), max(scaled)
        if high == low:
            low, high = low - abs(low) / 2 - 0.5 * (low == 0), high + abs(high) / 2 + 0.5 * (high == 0)
        return cls(axis, low, high, start, stop)

    def pixel(self, value: float) -> float:
        share = ((math.log10(value) if self.axis.is_log else value) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)

    def marks(self) -> list[tuple[float, str]]:
        return [
            (self.pixel(mark), safe(self.axis.format(mark))) for mark in ticks(self.low, self.high, self.axis.is_log)
        ]


def draw_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x: Axis = STEPS,
    y: Axis = VALUES,
    smoothing: float = 0.0,
    has_values: bool = False,
) -> str:
    """One SVG with title, curves and legend, which with `has_values` has the last values.

    `smoothing` from 0 to 1 draws a running mean over the faint curve. Points that an axis cannot show are left out.
    """
    drawn = []
    for number, line in enumerate(lines):
        points = [point for point in line.points if x.can_show(point[0]) and y.can_show(point[1])]
        if points:
            drawn.append(replace(line, points=points, colour=line.colour or COLOURS[number % len(COLOURS)]))
    named = [line for line in drawn if line.label]
    height = _HEIGHT + _LEGEND_PX * len(named)
    label = safe(f"{title}: {', '.join(line.label for line in named)}" if named else title)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}" data-points="{sum(len(line.points) for line in drawn)}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#777780">'
        f'<text x="{_LEFT}" y="16" font-size="13" font-weight="600">{safe(title)}</text>'
    ]
    if not drawn:
        return f'{parts[0]}<text x="{_LEFT}" y="{_HEIGHT // 2}">nothing logged yet</text></svg>'
    across = _Scale.fit(x, [point[0] for line in drawn for point in line.points], _LEFT, _WIDTH - _RIGHT)
    up = _Scale.fit(y, [point[1] for line in drawn for point in line.points], _HEIGHT - _BOTTOM, _TOP)
    for pixel, text in up.marks():
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{pixel}" y2="{pixel}" stroke="#888896" '
            f'stroke-opacity="0.3"/><text x="{_LEFT - 8}" y="{pixel + 4:.1f}" text-anchor="end">{text}</text>'
        )
    for pixel, text in across.marks():
        parts.append(f'<text x="{pixel}" y="{_HEIGHT - 14}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="16" text-anchor="end">{safe(x.name)}</text>')
    parts += [_draw_line(line, across, up, smoothing) for line in drawn]
    for number, line in enumerate(named):
        low = _HEIGHT + _LEGEND_PX * number
        value = f" {safe(y.format(line.points[-1][1]))}" if has_values else ""
        parts.append(
            f'<rect x="{_LEFT}" y="{low}" width="10" height="10" rx="3" fill="{line.colour}"/>'
            f'<text x="{_LEFT + 16}" y="{low + 9}">{safe(line.label)}{value}</text>'
        )
    return "".join(parts) + "</svg>"


def _draw_line(line: Line, across: _Scale, up: _Scale, smoothing: float) -> str:
    # A curve of a few records has no noise to smooth away.
    strength = smoothing if len(line.points) > _MIN_SMOOTHED else 0.0
    means = smooth(line.points, strength)
    dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    parts = []
    for points, opacity, width in ((line.points, 0.25, 1), (means, 1, 2)) if strength else ((means, 1, 2),):
        path = " ".join(f"{across.pixel(x)},{up.pixel(y)}" for x, y in thin(points))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-opacity="{opacity}" '
            f'stroke-width="{width}" stroke-linejoin="round"{dash}/>'
        )
    # Dots to point at tell their x and y. A single record would be no line at all, so dots of few records show.
    shown = dict.fromkeys(chain(means[:: max(1, -(-len(means) // _MAX_DOTS))], means[-1:]))
    opacity = 1 if len(means) <= _MIN_SMOOTHED else 0
    for x, y in shown:
        text = safe(f"{line.label}\n{across.axis.name} {across.axis.format(x)}: {up.axis.format(y)}")
        parts.append(
            f'<circle class="dot" cx="{across.pixel(x)}" cy="{up.pixel(y)}" r="3" fill="{line.colour}" '
            f'opacity="{opacity}"><title>{text}</title></circle>'
        )
    return "".join(parts)


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


def draw_histogram(title: str, bars: Sequence[tuple[str, int]]) -> str:
    """Bars of (label, count); each tells its count when pointed at."""
    width, height, left, bottom, top = 500, 200, 12, 40, 24
    highest = max((count for _, count in bars), default=0) or 1
    step = (width - 2 * left) / max(len(bars), 1)
    every = -(-len(bars) // _MAX_LABELS)
    parts = []
    for number, (label, count) in enumerate(bars):
        tall = count / highest * (height - bottom - top)
        x, y = left + number * step, height - bottom - tall
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(step - 2, 1):.1f}" height="{tall:.1f}" fill="{COLOURS[0]}">'
            f"<title>{safe(label)}: {count:,}</title></rect>"
        )
        if number % every == 0:
            parts.append(f'<text x="{x + step / 2:.1f}" y="{height - 22}" text-anchor="middle">{safe(label)}</text>')
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{safe(title)}" fill="#777780">'
        f'<line x1="{left}" x2="{width - left}" y1="{height - bottom}" y2="{height - bottom}" stroke="#888896" '
        f'stroke-opacity="0.3"/>{"".join(parts)}<text x="{left}" y="14">{safe(title)}</text>'
        f'<text x="{width - left}" y="14" text-anchor="end">highest: {highest:,}</text></svg>'
    )
