"""Rows as text, as a record with date and machine, and as a part of a page: tables and curves of what grows.

A page keeps its own text; what stands between the two marks is replaced. Pictures are SVG files with logarithmic axes
that need nothing else; they go into the folder `images` beside the page.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from benchmarks.harness import PACKAGES, Row
from benchmarks.topics import TOPICS
from frameloom.core.errors import DataError
from frameloom.core.files import write_text
from frameloom.evaluate.charts import Axis, Line, draw_chart

HEADER = ("comparison", "ours", "the other", "ratio", "processor: ours", "the other", "times", "the other is")
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
_PAGE_HEADER = ("", "ours", "the other", "ratio", "processor", "the other's", "times", "the other")


def format_value(value: float | None, unit: str) -> str:
    """Three or four digits in a unit that suits; "-" for nothing."""
    if value is None:
        return "-"
    if unit == "share":
        return f"{value:.1%}"
    steps = {"s": _TIME_UNITS, "B": _BYTE_UNITS}.get(unit)
    if steps is None:
        return f"{_shorten(value)} {unit}".rstrip()
    size, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{_shorten(value / size)} {name}"


def _shorten(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_ratio(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


def row_cells(row: Row) -> list[str]:
    """The cells of a row under `HEADER`; a row without numbers has its reason in the last one."""
    trouble = f"FAILED: {row.problem}" if row.problem else f"left out: {row.missing}" if row.missing else ""
    note = f"{row.against} ({row.note})" if row.against and row.note else row.against or row.note
    return [
        f"{row.topic}: {row.name}",
        format_value(row.ours, row.unit),
        format_value(row.other, row.unit),
        format_ratio(row.ratio),
        format_value(row.ours_cpu_s, "s"),
        format_value(row.other_cpu_s, "s"),
        str(row.repeats or "-"),
        trouble or note,
    ]


def format_row(row: Row) -> str:
    """One line with fixed columns, for rows that are printed as they come."""
    name, ours, other, ratio, cpu, other_cpu, times, note = row_cells(row)
    return f"{name:<60} {ours:>14} {other:>14} {ratio:>8} {cpu:>10} {other_cpu:>10} {times:>5}  {note}"


def format_header() -> str:
    name, ours, other, ratio, _, _, times, note = HEADER
    return f"{name:<60} {ours:>14} {other:>14} {ratio:>8} {'processor:':>10} {'the other':>10} {times:>5}  {note}"


def make_record(rows: Sequence[Row], *, is_quick: bool) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": format_machine(),
        "versions": _list_versions(["torch", *PACKAGES.values(), "av", "polars"]),
        "quick": is_quick,
        "rows": [row.to_json() for row in rows],
    }


def format_machine() -> str:
    """Processor, cores that this process may use, memory, system, Python."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.machine()}"
    return f"{_name_processor()}, {cores} cores, {memory:.0f} GiB, {system}, Python {platform.python_version()}"


def _name_processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "unknown processor"


def _list_versions(packages: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


@dataclass(frozen=True)
class _Record:
    """What a record must have for a page to be made of it."""

    date: str
    machine: str
    versions: dict[str, str | None]
    quick: bool
    rows: list[Row]


def read_record(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """A record and its rows; DataError unless a page can be made of it."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        TypeAdapter(_Record).validate_python(found)
        rows = [Row.from_json(values) for values in found["rows"]]
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DataError(f"{path}: not a file that python -m benchmarks --json wrote ({reason})") from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not a file that python -m benchmarks --json wrote ({error})") from error
    unknown = [row.topic for row in rows if row.topic not in TOPICS]
    if unknown:
        raise DataError(f"{path}: has rows of '{unknown[0]}', which is no comparison; known: {', '.join(TOPICS)}")
    return found, rows


def read_page(page: Path) -> tuple[str, str]:
    """What stands before and after the place of the table, marks included; DataError where there is no such place."""
    if not page.is_file():
        raise DataError(f"{page}: no such page; make it, with the lines {BEGIN} and {END} where the table goes")
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise DataError(f"{page}: it should have the lines {BEGIN} and {END} once each, between which the table goes")
    return text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]


def write_page(page: Path, record: Mapping[str, Any]) -> None:
    """Put the rows of a record into `page`."""
    before, after = read_page(page)
    rows = [Row.from_json(values) for values in record["rows"]]
    pictures = _draw(rows)
    folder = page.parent / "images"
    for name, content in pictures.items():
        folder.mkdir(exist_ok=True)
        write_text(folder / name, content)
    write_text(page, f"{before}\n\n{render(record, rows, list(pictures))}\n\n{after}")


def render(record: Mapping[str, Any], rows: Sequence[Row], pictures: Sequence[str]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    parts = [f"Measured on {record['date']}: {record['machine']}. {versions}."]
    if record["quick"]:
        parts.append("**A quick run on small inputs: these numbers mean nothing.**")
    for topic in dict.fromkeys(row.topic for row in rows):
        about = TOPICS[topic].about
        parts.append(f"### {about[0].upper()}{about[1:]} (`python -m benchmarks {topic}`)")
        parts.append(_table([row for row in rows if row.topic == topic]))
        parts += [f"![{_title(name)}](images/{name})" for name in pictures if name.startswith(f"growth-{topic}-")]
    return "\n\n".join(parts)


def _title(name: str) -> str:
    _, topic, axis = name.removesuffix(".svg").split("-", 2)
    return f"{topic} by {axis}"


def _table(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(_PAGE_HEADER) + " |", "|---" + "|--:" * 6 + "|---|"]
    for row in rows:
        cells = row_cells(row)
        cells[0] = row.name
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _draw(rows: Sequence[Row]) -> dict[str, str]:
    """A picture for each comparison, axis and unit with at least two places: ours and the other."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.at is not None and row.ours is not None:
            groups.setdefault((row.topic, row.at[0], row.unit), []).append(row)
    pictures = {}
    for (topic, axis, unit), group in groups.items():
        lines = [line for line in _lines(group) if len(line.points) > 1]
        if lines:
            name = f"growth-{topic}-{axis}{'-memory' if unit == 'B' else ''}.svg"
            across = Axis(axis, is_log=True, format="{:,.0f}".format)
            up = Axis(is_log=True, format=partial(format_value, unit=unit))
            pictures[name] = draw_chart(f"{topic}: {TOPICS[topic].about}", lines, x=across, y=up) + "\n"
    return pictures


def _lines(rows: Sequence[Row]) -> list[Line]:
    """One line for Frameloom, one for each baseline; the first word of a name separates several of Frameloom."""
    firsts = dict.fromkeys(row.name.partition(":")[0] if ":" in row.name else "" for row in rows)
    found = []
    for first in firsts:
        own = [row for row in rows if (row.name.partition(":")[0] if ":" in row.name else "") == first]
        found.append(Line(first or "ours", sorted((row.at[1], row.ours) for row in own if row.at and row.ours)))
        others = sorted((row.at[1], row.other) for row in own if row.at and row.other)
        found.append(Line(own[0].against.partition(",")[0], others, is_dashed=True))
    return found
