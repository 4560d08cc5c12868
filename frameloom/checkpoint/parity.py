"""Golden files through our models: how far is each output from the published one?

Knows the file format and the verdicts, and no model: the caller brings the runners.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from frameloom.core.errors import CheckpointError
from frameloom.core.parity import ParityCase, ParityOutput, ParityRunner


class _ReadCase(Protocol):
    def __call__(self, path: Path, *, name: str) -> ParityCase: ...


Verdict = Literal["ok", "above tolerance", "wrong shape", "not compared"]
NO_MODEL = "no model for this case"


@dataclass(frozen=True)
class OutputResult:
    """`max_abs_error` is None when nothing could be subtracted."""

    name: str
    shape: tuple[int, ...]
    max_abs_error: float | None
    tolerance: float
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True)
class CaseResult:
    """`note` says why a case has no outputs: no runner knows it, or its runner failed."""

    name: str
    outputs: list[OutputResult] = field(default_factory=list)
    note: str = ""
    failed: bool = False

    @property
    def num_compared(self) -> int:
        return sum(output.verdict != "not compared" for output in self.outputs)

    @property
    def is_good(self) -> bool:
        return not self.failed and all(output.verdict in ("ok", "not compared") for output in self.outputs)


def run_parity(folder: Path, runners: Sequence[ParityRunner]) -> list[CaseResult]:
    """Every `.safetensors` and `.json` file below `folder`, by its path; CheckpointError for an unreadable one."""
    return [run_case(case, runners) for case in read_cases(folder)]


def run_case(case: ParityCase, runners: Sequence[ParityRunner]) -> CaseResult:
    runner = next((runner for runner in runners if runner.matches(case)), None)
    if runner is None:
        return CaseResult(case.name, note=NO_MODEL)
    try:
        outputs = runner.run(case)
    except Exception as error:
        # A model that breaks on one case is a finding about that case; the others are still worth knowing.
        return CaseResult(case.name, note=" ".join(f"{type(error).__name__}: {error}".split()), failed=True)
    return CaseResult(case.name, [judge(output) for output in outputs])


def judge(output: ParityOutput) -> OutputResult:
    """Compare in double precision; a number that is not finite is above every tolerance."""
    shape = tuple(output.expected.shape)
    if output.ours is None:
        return OutputResult(output.name, shape, None, output.tolerance, "not compared", output.note)
    if output.ours.shape != output.expected.shape:
        note = f"ours is {tuple(output.ours.shape)}"
        return OutputResult(output.name, shape, None, output.tolerance, "wrong shape", note)
    error = _max_abs_difference(output.ours, output.expected)
    if not math.isfinite(error):
        return OutputResult(output.name, shape, None, output.tolerance, "above tolerance", "not a finite number")
    verdict: Verdict = "ok" if error <= output.tolerance else "above tolerance"
    return OutputResult(output.name, shape, error, output.tolerance, verdict, output.note)


def _max_abs_difference(ours: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((ours.detach().double() - expected.double()).abs().max())


def read_cases(folder: Path) -> Iterator[ParityCase]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give a folder of golden files")
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _READERS and path.is_file())
    if not paths:
        raise CheckpointError(f"{folder}: holds no .safetensors or .json file; give a folder of golden cases")
    for path in paths:
        yield _READERS[path.suffix](path, name=path.relative_to(folder).with_suffix("").as_posix())


def read_case(path: Path, *, name: str) -> ParityCase:
    """One golden file; the metadata key `config` is JSON, and a file without it becomes a case without a model."""
    try:
        with safe_open(path, framework="pt") as file:
            config = json.loads((file.metadata() or {}).get("config", "{}"))
            keys = file.keys()
            tensors = {key: file.get_tensor(key) for key in keys}
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as a golden file ({error}); copy it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: the metadata key config holds {type(config).__name__}, expected a JSON object")
    return ParityCase(
        name=name,
        config=config,
        weights={key: _to_float32(tensor) for key, tensor in _strip(tensors, "weights.").items()},
        inputs=_strip(tensors, "in."),
        outputs=_strip(tensors, "out."),
    )


def read_table(path: Path, *, name: str) -> ParityCase:
    """A golden file without tensors: its whole content is the config; what is no JSON object has no runner."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as a golden file ({error}); copy it again") from error
    return ParityCase(name, config if isinstance(config, dict) else {}, {}, {}, {})


_READERS: dict[str, _ReadCase] = {".safetensors": read_case, ".json": read_table}


def _strip(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


def format_table(results: Sequence[CaseResult]) -> list[str]:
    """One line for each output, columns aligned, and a line that counts the verdicts."""
    rows = [("case", "output", "shape", "max error", "tolerance", "verdict")]
    for case in results:
        if not case.outputs:
            rows.append((case.name, "-", "-", "-", "-", f"failed: {case.note}" if case.failed else case.note))
        rows += [_format_row(case.name, output) for output in case.outputs]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]) for row in rows
    ]
    return [*lines, "", summarize(results)]


def _format_row(case: str, output: OutputResult) -> tuple[str, str, str, str, str, str]:
    shape = "x".join(map(str, output.shape)) or "scalar"
    error = "-" if output.max_abs_error is None else f"{output.max_abs_error:.2e}"
    verdict = f"{output.verdict}: {output.note}" if output.note else output.verdict
    return case, output.name, shape, error, f"{output.tolerance:.0e}", verdict


def summarize(results: Sequence[CaseResult]) -> str:
    outputs = [output for case in results for output in case.outputs]
    num_ok = sum(output.verdict == "ok" for output in outputs)
    num_skipped = sum(output.verdict == "not compared" for output in outputs)
    num_unknown = sum(case.note == NO_MODEL for case in results)
    num_failed = sum(case.failed for case in results)
    return (
        f"{len(results)} cases: {num_ok} outputs ok, {len(outputs) - num_ok - num_skipped} off, {num_skipped} not "
        f"compared; {num_failed} cases failed, {num_unknown} without a model"
    )


def to_json(results: Sequence[CaseResult]) -> dict[str, Any]:
    return {"summary": summarize(results), "cases": [{**asdict(case), "is_good": case.is_good} for case in results]}
