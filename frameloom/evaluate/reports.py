"""HTML reports from templates: of a dataset, of an objective, and what other reports are written with.

Text from outside is escaped; pictures and videos are in the file. Shape letters: L noise levels.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from frameloom.core.errors import ConfigError
from frameloom.core.files import write_text
from frameloom.data.buckets.policy import BucketUse
from frameloom.data.curation.report import SetFacts
from frameloom.diffusion.noise_levels import Profile
from frameloom.evaluate.charts import Axis, Line, draw_chart, draw_histogram

OBJECTIVE_HEADER = ("noise level", "signal/noise", "draws", "density", "weight", "pull", "pull on noise")
OBJECTIVE_SUFFIXES = (".html", ".svg")
_NUM_ROWS = 10
_MEDIA_TYPES = {".jpeg": "image/jpeg", ".png": "image/png", ".gif": "image/gif", ".webm": "video/webm"}
_OBJECTIVE_LEAD = (
    "The noise level is 0 for data and 1 for noise, the same for all objectives: with noisy = signal * latent + spread "
    "* noise it is spread / (signal + spread). Pull is how much of the training goes to a level; pull on noise is the "
    "same for the error of the noise, which compares objectives that predict different things."
)


def write_page(out: Path, template: str, **values: object) -> None:
    """Render a template of the package, such as `demo/report.html`, with its title, lead and other values."""
    environment = Environment(
        loader=PackageLoader("frameloom", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = _to_data_uri
    environment.globals |= {
        "chart": lambda *given, **options: Markup(draw_chart(*given, **options)),
        "histogram": lambda *given: Markup(draw_histogram(*given)),
    }
    write_text(out, environment.get_template(template).render(values))


def _to_data_uri(media: Path | bytes) -> str:
    """A file, or the bytes of a JPEG, as an address that holds the whole content."""
    data, suffix = (media, ".jpeg") if isinstance(media, bytes) else (media.read_bytes(), media.suffix.lower())
    return f"data:{_MEDIA_TYPES.get(suffix, 'video/mp4')};base64,{base64.b64encode(data).decode()}"


def write_data_report(
    facts: SetFacts, out: Path, *, buckets: Sequence[BucketUse] | None = None, unused: dict[str, int] | None = None
) -> None:
    """Write the page of a dataset; `buckets` and `unused` come from a recipe."""
    rows = [
        [
            use.bucket.name,
            f"{use.bucket.width}x{use.bucket.height}",
            use.bucket.frames,
            use.num_clips,
            use.bucket.batch_size,
            use.num_batches,
        ]
        for use in buckets or ()
    ]
    write_page(
        out,
        "evaluate/data_report.html",
        title=facts.title,
        lead="What is in the set, how it spreads over sizes and lengths, and which files cannot be used.",
        facts=facts,
        buckets=None if buckets is None else rows,
        unused=", ".join(f"{count:,} {reason}" for reason, count in (unused or {}).items() if count),
        longest=[(f"{len(text):,}", text) for text in facts.longest_captions if text],
        broken=[(path, reason, detail or "") for path, reason, detail in facts.broken],
    )


def write_objective_report(title: str, profiles: Mapping[str, Profile], out: Path) -> None:
    """How often each noise level is sampled and how much it weighs: a page (.html), or the plot alone (.svg)."""
    refuse_suffix(out)
    panels = {
        "sampling density": [profile.density_L for profile in profiles.values()],
        "weight of the loss": [profile.weight_L for profile in profiles.values()],
        "pull: density times weight": [profile.pull_L for profile in profiles.values()],
    }
    charts, panel_px = [], 270 + 20 * len(profiles)
    for number, (name, values) in enumerate(panels.items()):
        lines = [
            Line(label, list(zip(profile.level_L.tolist(), value_L.tolist(), strict=True)))
            for (label, profile), value_L in zip(profiles.items(), values, strict=True)
        ]
        chart = draw_chart(name, lines, x=Axis("noise level", format="{:g}".format), y=Axis(from_zero=True))
        charts.append(f'<g transform="translate(0,{number * panel_px})">{chart}</g>')
    plot = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="560" height="{len(panels) * panel_px}">{"".join(charts)}</svg>'
    )
    if out.suffix == ".svg":
        write_text(out, plot)
        return
    write_page(
        out,
        "evaluate/objective_report.html",
        title=title,
        lead=_OBJECTIVE_LEAD,
        plot=Markup(plot),
        header=OBJECTIVE_HEADER,
        profiles=[(name, summarize(profile), table_rows(profile)) for name, profile in profiles.items()],
    )


def format_objective_report(title: str, profiles: Mapping[str, Profile]) -> str:
    """Plain text: a table for each profile."""
    parts = [title]
    for name, profile in profiles.items():
        rows = [list(OBJECTIVE_HEADER), *table_rows(profile)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(OBJECTIVE_HEADER))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        parts.append("\n".join([f"\n{name}: {summarize(profile)}", *lines]))
    return "\n".join(parts)


def refuse_suffix(out: Path) -> None:
    if out.suffix not in OBJECTIVE_SUFFIXES:
        raise ConfigError(f"{out}: a report ends in {' or '.join(OBJECTIVE_SUFFIXES)}; choose one of them")


def summarize(profile: Profile) -> str:
    return (
        f"mean noise level {profile.mean(profile.level_L):.3f}, mean weight {profile.mean(profile.weight_L):.4g}, "
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
