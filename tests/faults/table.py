"""The fault table: what is done to the program, and for each row of a test run the faults injected and survived.

docs/reliability.md says what is promised for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

PROPERTY = "faults"

ROWS = {
    1: "kills during a save",
    2: "kills during a save of two ranks",
    3: "kills while a step is saved again",
    4: "kills while old checkpoints are deleted",
    5: "full disk, read-only folder",
    6: "flipped bytes in a checkpoint",
    7: "missing, cut and empty files of a checkpoint",
    8: "a checkpoint that one rank does not see",
    9: "weights changed during a save in the background",
    10: "a second process on a run, a stale lock",
    11: "formats of checkpoints and recipes",
    12: "stop and resume at every step",
    13: "several resumes in one epoch",
    14: "another number of loader workers",
    15: "another number of ranks",
    16: "SIGTERM, SIGINT, twice",
    17: "stray random draws",
    18: "controls of the equalities above",
    19: "broken clips",
    20: "flipped bits in clips",
    21: "clips too large or too long",
    22: "too many bad clips",
    23: "loader workers that die, stop or hang",
    24: "thousands of clips decoded",
    25: "buckets of unequal size over ranks",
    26: "data changed between save and resume",
    27: "numbers that are not finite",
    28: "out of memory",
    29: "ranks that die, stop or are slow",
    30: "code in weight files",
    31: "attacks on safetensors headers",
    32: "paths and archives that lead outside",
    33: "prompts as file names",
    34: "web page: addresses and files",
    35: "web page: large and many requests",
    36: "mistakes in recipes",
    37: "dangerous calls in the source, secrets in files",
}


def count_reports(reports: Iterable[Any]) -> tuple[Counter[int], Counter[int]]:
    """Faults injected and survived by row; a test that fails has survived none, and had one at least."""
    injected: Counter[int] = Counter()
    survived: Counter[int] = Counter()
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == PROPERTY:
                row, count = value
                injected[row] += max(count, 1) if report.failed else count
                survived[row] += 0 if report.failed else count
    return injected, survived


def format_table(injected: Counter[int], survived: Counter[int]) -> list[str]:
    lines = [f"{'row':>3}  {'what':<52} {'injected':>8} {'survived':>8}"]
    for row, what in ROWS.items():
        numbers = f"{injected[row]:>8} {survived[row]:>8}" if row in injected else f"{'not run':>17}"
        mark = "  <- FAILED" if survived[row] < injected[row] else ""
        lines.append(f"{row:>3}  {what:<52} {numbers}{mark}")
    return [*lines, f"     {'all':<52} {injected.total():>8} {survived.total():>8}"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        if getattr(report, "when", "") == "call"
    ]
    injected, survived = count_reports(reports)
    if injected:
        terminalreporter.section("faults")
        for line in format_table(injected, survived):
            terminalreporter.write_line(line)
