"""What plan, shares and agreement cost beside a step, for thousands of processes, with failures and changes of size."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import BenchSettings, Row, compare_numbers, measure_or_skip
from frameloom.core.errors import RunError

try:
    from tests.simulation import Report, Scenario, simulate
except ModuleNotFoundError as error:
    if error.name not in ("tests", "tests.simulation"):
        raise
    raise RunError(
        "tests/simulation.py is not found; run `python -m benchmarks` from the root of a clone of the repository"
    ) from error

_SIZES = {512: (512, 496, 384), 4096: (4096, 4088, 3584)}
_SMALL_SIZES = {16: (16, 12), 64: (64,)}
_STEPS = 1000


def measure(bench: BenchSettings) -> Iterator[Row]:
    """`rounds` thousand steps for each size of cluster."""
    for size, sizes in bench.pick(_SIZES, _SMALL_SIZES).items():
        yield from measure_or_skip("cluster", f"{size:,} processes", _measure, size, sizes, bench)


def _measure(size: int, sizes: tuple[int, ...], bench: BenchSettings) -> Row:
    # About as many steps an epoch for each, so that ends of epochs are among them.
    steps = bench.rounds * bench.pick(_STEPS, 10)
    report = simulate_quietly(Scenario(sizes=sizes, num_rows=size * bench.pick(2000, 200), num_steps=steps))
    if report.problems:
        raise ValueError("; ".join(report.problems))
    return compare_numbers(
        "cluster",
        f"10,000 steps of {size:,} processes",
        report.seconds_per_10k,
        unit="s",
        repeats=report.num_steps,
        note=f"longest step {1000 * report.longest_step_s:.1f} ms, {report.num_failures} failures, "
        f"{report.num_damaged} damaged saves, {report.num_found} of {report.num_dissents} dissents found",
        at=("processes", size),
    )


def simulate_quietly(scenario: Scenario) -> Report:
    """A damaged checkpoint is part of the exercise, not news."""
    store = logging.getLogger("frameloom.checkpoint.writer")
    level = store.level
    store.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return simulate(scenario, Path(folder))
    finally:
        store.setLevel(level)
