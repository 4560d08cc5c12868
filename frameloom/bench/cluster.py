"""What plan, shares and agreement cost beside a step, for thousands of processes, with failures and changes of size."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

from frameloom.train.parallel.simulation import Report, Scenario, simulate

_SIZES = {512: (512, 496, 384), 4096: (4096, 4088, 3584)}
_STEPS = 1000


@dataclass(frozen=True)
class ClusterResult:
    """A report for each size."""

    reports: dict[int, Report]

    def describe(self) -> list[str]:
        lines = ["simulated cluster: the real plan, agreement, checkpoints and resume; no model"]
        for size, report in self.reports.items():
            lines.append(
                f"  {size:,} processes: {report.seconds_per_10k:.2f} s per 10,000 steps, longest step "
                f"{1000 * report.longest_step_s:.1f} ms, a plan {report.plan_seconds / report.num_plans:.2f} s; "
                f"{report.num_steps:,} steps, {report.num_epochs} epochs, "
                f"{report.num_failures} failures with another size after each, {report.num_damaged} damaged saves, "
                f"{report.num_found} of {report.num_dissents} dissents found"
            )
            lines += [f"    WRONG: {problem}" for problem in report.problems]
        return lines

    def to_json(self) -> dict[str, object]:
        return {
            str(size): {**vars(report), "seconds_per_10k": report.seconds_per_10k}
            for size, report in self.reports.items()
        }


def compare_cluster(rounds: int) -> ClusterResult:
    """`rounds` thousand steps for each size of cluster."""
    reports = {}
    # A damaged checkpoint is part of the exercise, not news.
    store = logging.getLogger("frameloom.checkpoint.store")
    level = store.level
    store.setLevel(logging.ERROR)
    try:
        for size, sizes in _SIZES.items():
            # About as many steps an epoch for each, so that ends of epochs are among them.
            scenario = Scenario(sizes=sizes, num_rows=size * 2000, num_steps=rounds * _STEPS)
            with tempfile.TemporaryDirectory() as folder:
                reports[size] = simulate(scenario, Path(folder))
    finally:
        store.setLevel(level)
    return ClusterResult(reports)
