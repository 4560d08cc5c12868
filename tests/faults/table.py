"""The table that ends a test run: for each row of the fault table, faults injected and survived."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.faults.rows import ROWS

PROPERTY = "faults"


@dataclass
class Count:
    """`num_tests` of a row; a test that fails counts as one fault that was not survived, if it has told of none."""

    num_tests: int = 0
    injected: int = 0
    survived: int = 0

    def add(self, injected: int, survived: int) -> None:
        self.injected += injected
        self.survived += survived


def count_reports(reports: Iterable[Any]) -> dict[int, Count]:
    """Sums over reports of tests; what a test has counted came with its report, also from another process."""
    counts: dict[int, Count] = {}
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name != PROPERTY:
                continue
            row, injected, survived = value
            count = counts.setdefault(row, Count())
            count.num_tests += 1
            count.add(max(injected, 1) if report.failed else injected, survived if not report.failed else 0)
    return counts


def format_table(counts: dict[int, Count]) -> list[str]:
    lines = [f"{'row':>3}  {'what':<52} {'injected':>8} {'survived':>8}"]
    for row, what in ROWS.items():
        count = counts.get(row)
        numbers = f"{count.injected:>8} {count.survived:>8}" if count else f"{'not run':>17}"
        mark = "  <- FAILED" if count and count.survived < count.injected else ""
        lines.append(f"{row:>3}  {what:<52} {numbers}{mark}")
    total = [sum(getattr(count, key) for count in counts.values()) for key in ("injected", "survived")]
    return [*lines, f"     {'all':<52} {total[0]:>8} {total[1]:>8}"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        if getattr(report, "when", "") == "call"
    ]
    counts = count_reports(reports)
    if counts:
        terminalreporter.section("faults")
        for line in format_table(counts):
            terminalreporter.write_line(line)
