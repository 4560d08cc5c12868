"""Report on an objective: how often each noise level is sampled and how much it weighs, as a table and a plot.

Shape letters: L noise levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.core.files import write_text
from frameloom.diffusion.noise_levels import Profile
from frameloom.evaluate.page import page, paragraph, section, table

HEADER = ("noise level", "signal/noise", "draws", "density", "weight", "pull", "pull on noise")
SUFFIXES = (".html", ".svg")
_NUM_ROWS = 10
_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 210, 60, 16, 34, 26
_COLOURS = ("#4f6df5", "#e0723a", "#1d8a4e", "#a04fd0")
_STYLE = "text { font: 12px system-ui, sans-serif; fill: #808088; } rect.paper { fill: none; }"
_PANELS: tuple[tuple[str, Callable[[Profile], Tensor]], ...] = (
    ("sampling density", lambda profile: profile.density_L),
    ("weight of the loss", lambda profile: profile.weight_L),
    ("pull: density times weight", lambda profile: profile.pull_L),
)
_LEAD = (
    "The noise level is 0 for data and 1 for noise, the same for all objectives: with noisy = signal * latent + spread "
    "* noise it is spread / (signal + spread). Pull is how much of the training goes to a level; pull on noise is the "
    "same for the error of the noise, which compares objectives that predict different things."
)


def write_objective_report(title: str, profiles: Mapping[str, Profile], out: Path) -> None:
    """A page (.html) with plot and tables, or the plot alone (.svg)."""
    refuse_suffix(out)
    if out.suffix == ".svg":
        write_text(out, draw_profiles(title, profiles))
        return
    sections = [section("Over the noise level", draw_profiles(title, profiles))]
    for name, profile in profiles.items():
        sections.append(section(name, paragraph(summarize(profile)), table(HEADER, table_rows(profile))))
    write_text(out, page(title, _LEAD, sections))


def format_report(title: str, profiles: Mapping[str, Profile]) -> str:
    """Plain text: a table for each profile."""
    parts = [title]
    for name, profile in profiles.items():
        rows = [list(HEADER), *table_rows(profile)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        parts.append("\n".join([f"\n{name}: {summarize(profile)}", *lines]))
    return "\n".join(parts)


def refuse_suffix(out: Path) -> None:
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"{out}: a report ends in {' or '.join(SUFFIXES)}; choose one of them")


def summarize(profile: Profile) -> str:
    return (
        f"mean noise level {profile.mean_level:.3f}, mean weight {profile.mean_weight:.4g}, "
        f"half of the pull below noise level {profile.pull_middle():.3f}"
    )


def table_rows(profile: Profile, num_rows: int = _NUM_ROWS) -> list[list[str]]:
    """One row per band, made of the finer bands of the profile; pulls are shares of the whole in percent."""
    size = len(profile.level_L) // num_rows
    pulls = [part / part[part.isfinite()].sum() for part in (profile.pull_L, profile.noise_pull_L)]
    rows = []
    for row in range(num_rows):
        part = slice(row * size, (row + 1) * size)
        middle = (row + 0.5) / num_rows
        rows.append(
            [
                f"{row / num_rows:.1f} to {(row + 1) / num_rows:.1f}",
                f"{((1 - middle) / middle) ** 2:.3g}",
                f"{100 * float(profile.share_L[part].sum()):.1f}%",
                f"{float(profile.density_L[part].mean()):.3f}",
                f"{float(profile.weight_L[part].mean()):.4g}",
                *(f"{100 * float(pull_L[part].sum()):.1f}%" for pull_L in pulls),
            ]
        )
    return rows


def draw_profiles(title: str, profiles: Mapping[str, Profile]) -> str:
    """Three panels below each other, a line for each profile."""
    height = len(_PANELS) * _PANEL + 24 * len(profiles) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}"><style>{_STYLE}</style>'
    ]
    for number, (name, pick) in enumerate(_PANELS):
        lines = [(profile.level_L.tolist(), pick(profile).tolist()) for profile in profiles.values()]
        parts.append(f'<g transform="translate(0,{number * _PANEL})">{_draw_panel(name, lines)}</g>')
    for number, name in enumerate(profiles):
        y = len(_PANELS) * _PANEL + 24 * number + 16
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + 26}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{_LEFT + 34}" y="{y}">{escape(name)}</text>'
        )
    return "".join(parts) + "</svg>"


def _draw_panel(name: str, lines: Sequence[tuple[list[float], list[float]]]) -> str:
    finite = [y for _, values in lines for y in values if math.isfinite(y)]
    top = (max(finite, default=1.0) or 1.0) * 1.05
    inner, tall = _WIDTH - _LEFT - _RIGHT, _PANEL - _TOP - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="18">{escape(name)}</text>']
    for share in (0.0, 0.5, 1.0):
        y = _TOP + tall * (1 - share)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8888" stroke-width="0.5"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * top:.3g}</text>'
        )
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = _LEFT + inner * level, _PANEL - 8
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{level:g}</text>')
    for number, (levels, values) in enumerate(lines):
        points = " ".join(
            f"{_LEFT + inner * level:.1f},{_TOP + tall * (1 - value / top):.1f}"
            for level, value in zip(levels, values, strict=True)
            if math.isfinite(value)
        )
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "".join(parts)
