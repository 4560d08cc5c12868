"""Rows as a table of text, and with date and machine as a record that a page can be made from."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from frameloom.bench.harness import Row
from frameloom.bench.peers import PACKAGES

HEADER = ("comparison", "ours", "the other", "ratio", "processor: ours", "the other", "times", "the other is")
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


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


def describe_row(row: Row) -> str:
    """One line with fixed columns, for rows that are printed as they come."""
    name, ours, other, ratio, cpu, other_cpu, times, note = row_cells(row)
    return f"{name:<60} {ours:>14} {other:>14} {ratio:>8} {cpu:>10} {other_cpu:>10} {times:>5}  {note}"


def describe_header() -> str:
    name, ours, other, ratio, _, _, times, note = HEADER
    return f"{name:<60} {ours:>14} {other:>14} {ratio:>8} {'processor:':>10} {'the other':>10} {times:>5}  {note}"


def make_record(rows: Sequence[Row], *, is_quick: bool) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "versions": _list_versions(["torch", *PACKAGES.values(), "av", "polars"]),
        "quick": is_quick,
        "rows": [row.to_json() for row in rows],
    }


def describe_machine() -> str:
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
