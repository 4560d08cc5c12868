"""Golden files through our models: how far is each output from the published one?

Every file ends as one of: compared in all its outputs,
information (it holds nothing to compute), a listed deviation, or an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch

from tests.parity.cases import RUNNERS, ParityCase, ParityOutput, Runner, list_goldens, read_golden
from tests.parity.deviations import Deviation, find_by_name, read_deviations

Verdict = Literal["ok", "deviation", "above tolerance", "wrong shape", "not compared"]
Status = Literal["compared", "information", "deviation", "failed", "unknown"]
NO_MODEL = "no runner knows this kind of file"

# Each registers its runners; the first that knows a file gets it.
for _module in (
    "cogvideox_fun_data",
    "cogvideox_fun_masks",
    "cogvideox_fun_pixels",
    "cogvideox_fun_sampling",
    "cogvideox_fun_transformer",
    "noise_schedules",
    "opensora2_data",
    "opensora2_sampling",
    "opensora2_training",
    "opensora2_transformer",
    "opensora_plan_adversarial",
    "opensora_plan_data",
    "opensora_plan_transformers",
    "optimization",
    "state_dict_manifest",
    "vaes",
):
    import_module(f"tests.parity.{_module}")

_COMPARED = ("ok", "above tolerance", "wrong shape")

# Files that say something about the published code and hold no result of it.
INFORMATION = ("diffusers_compare_*", "*_notes", "*_equivalences")


@dataclass(frozen=True)
class OutputResult:
    """`max_abs_error` is None when nothing could be subtracted."""

    name: str
    shape: tuple[int, ...]
    max_abs_error: float | None
    tolerance: float
    verdict: Verdict
    note: str = ""

    @property
    def is_good(self) -> bool:
        return self.verdict in ("ok", "deviation")


@dataclass(frozen=True)
class CaseResult:
    """`note` says why a case has no outputs."""

    name: str
    outputs: list[OutputResult] = field(default_factory=list)
    note: str = ""
    status: Status = "compared"

    @property
    def failed(self) -> bool:
        return self.status == "failed"

    @property
    def num_compared(self) -> int:
        return sum(output.max_abs_error is not None or output.verdict in _COMPARED for output in self.outputs)

    @property
    def is_good(self) -> bool:
        return self.status not in ("failed", "unknown") and all(output.is_good for output in self.outputs)


def run_parity(folder: Path, runners: Sequence[Runner] = RUNNERS) -> Iterator[CaseResult]:
    """Every golden file below `folder`, by its path; CheckpointError for an unreadable one."""
    cases, strangers = list_goldens(folder)
    for path in cases:
        yield run_case(read_golden(path, folder), runners)
    for path in strangers:
        yield CaseResult(path.relative_to(folder).as_posix(), note=NO_MODEL, status="unknown")


def run_case(
    case: ParityCase, runners: Sequence[Runner] = RUNNERS, deviations: Sequence[Deviation] | None = None
) -> CaseResult:
    known = read_deviations() if deviations is None else deviations
    if any(fnmatchcase(case.kind, pattern) for pattern in INFORMATION):
        return CaseResult(case.name, note="says something about the published code", status="information")
    if whole := next((entry for entry in known if entry.covers_case(case.kind)), None):
        return CaseResult(case.name, note=whole.reason, status="deviation")
    try:
        runner = find_runner(case, runners)
        if runner is None:
            return CaseResult(case.name, note=NO_MODEL, status="unknown")
        outputs = _add_left_out(case, runner.run(case))
        return CaseResult(case.name, [_judge_in_case(case, output, known) for output in outputs])
    except Exception as error:
        # A model that breaks on one case is a finding about that case; the others are still worth knowing.
        note = " ".join(f"{type(error).__name__}: {error}".split())
        return CaseResult(case.name, note=note, status="failed")


def find_runner(case: ParityCase, runners: Sequence[Runner] = RUNNERS) -> Runner | None:
    """The first that knows a case gets it."""
    return next((runner for runner in runners if runner.matches(case)), None)


def _add_left_out(case: ParityCase, outputs: list[ParityOutput]) -> list[ParityOutput]:
    """A tensor of the file that its runner does not speak of was not compared."""
    named = {output.name for output in outputs}
    note = "its runner leaves it out"
    missing = [
        ParityOutput(name, None, tensor, 0.0, note) for name, tensor in case.outputs.items() if name not in named
    ]
    if not outputs and not missing:
        missing = [ParityOutput("(nothing)", None, torch.zeros(0), 0.0, "its runner found nothing to compare")]
    return outputs + missing


def _judge_in_case(case: ParityCase, output: ParityOutput, deviations: Sequence[Deviation]) -> OutputResult:
    result = judge(output)
    entry = None
    if output.deviation and result.verdict in ("ok", "not compared"):
        entry = find_by_name(deviations, output.deviation, case.kind)
    elif result.verdict == "not compared":
        entry = next((entry for entry in deviations if entry.covers_output(case.kind, output.name)), None)
    if entry is None:
        return result
    return replace(result, verdict="deviation", note=entry.reason)


def judge(output: ParityOutput) -> OutputResult:
    """Compare in double precision; a number that is not finite is above every tolerance."""

    def give(verdict: Verdict, note: str = output.note, error: float | None = None) -> OutputResult:
        return OutputResult(output.name, tuple(output.expected.shape), error, output.tolerance, verdict, note)

    if output.ours is None:
        return give("not compared")
    if output.ours.shape != output.expected.shape:
        return give("wrong shape", f"ours is {tuple(output.ours.shape)}")
    ours, expected = output.ours.detach().double(), output.expected.double()
    # Equal infinities differ by nothing, though their difference is no number.
    differences = torch.where(ours == expected, 0.0, ours - expected).abs()
    error = float(differences.max()) if differences.numel() else 0.0
    if not math.isfinite(error):
        return give("above tolerance", "not a finite number")
    return give("ok" if error <= output.tolerance else "above tolerance", error=error)


def format_table(results: Sequence[CaseResult], *, verbose: bool = False) -> list[str]:
    """One line for each case, or for each output, columns aligned, and a line that counts the verdicts."""
    rows: list[tuple[str, ...]]
    if verbose:
        rows = [("case", "output", "shape", "max error", "tolerance", "verdict")]
        rows += [row for case in results for row in _output_rows(case)]
    else:
        rows = [("case", "largest error", "tolerance", "verdict"), *(_case_row(case) for case in results)]
    num_columns = len(rows[0]) - 1
    widths = [max(len(row[column]) for row in rows) for column in range(num_columns)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    return [*lines, "", summarize(results)]


def _output_rows(case: CaseResult) -> list[tuple[str, ...]]:
    if not case.outputs:
        return [(case.name, "-", "-", "-", "-", f"{case.status}: {case.note}")]
    rows: list[tuple[str, ...]] = []
    for output in case.outputs:
        shape = "x".join(map(str, output.shape)) or "scalar"
        verdict = f"{output.verdict}: {output.note}" if output.note else output.verdict
        rows.append((case.name, output.name, shape, *_format_numbers(output), verdict))
    return rows


def _case_row(case: CaseResult) -> tuple[str, ...]:
    if not case.outputs:
        return case.name, "-", "-", f"{case.status}: {case.note}"
    bad = [output for output in case.outputs if not output.is_good]
    worst = max(bad or case.outputs, key=lambda output: -1.0 if output.max_abs_error is None else output.max_abs_error)
    num_deviations = sum(output.verdict == "deviation" for output in case.outputs)
    if bad:
        note = f" ({worst.note})" if worst.note else ""
        verdict = f"{worst.verdict}: {worst.name}{note}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
    else:
        extra = f", {num_deviations} listed deviations" if num_deviations else ""
        verdict = f"ok: {len(case.outputs) - num_deviations} outputs{extra}"
    return case.name, *_format_numbers(worst), verdict


def _format_numbers(output: OutputResult) -> tuple[str, str]:
    return "-" if output.max_abs_error is None else f"{output.max_abs_error:.2e}", f"{output.tolerance:.0e}"


def summarize(results: Sequence[CaseResult]) -> str:
    outputs = [output for case in results for output in case.outputs]
    count = {verdict: sum(output.verdict == verdict for output in outputs) for verdict in ("ok", "deviation")}
    cases = {status: sum(case.status == status for case in results) for status in ("information", "deviation")}
    num_broken = {status: sum(case.status == status for case in results) for status in ("failed", "unknown")}
    return (
        f"{len(results)} cases, {sum(case.num_compared for case in results)} outputs compared: {count['ok']} ok, "
        f"{len(outputs) - sum(count.values())} off, "
        f"{count['deviation']} listed deviations; {cases['information']} files of information, {cases['deviation']} "
        f"listed as deviations, {num_broken['failed']} failed, {num_broken['unknown']} unknown"
    )


def to_json(results: Sequence[CaseResult]) -> dict[str, Any]:
    return {
        "summary": summarize(results),
        "cases": [{**asdict(case), "failed": case.failed, "is_good": case.is_good} for case in results],
    }
