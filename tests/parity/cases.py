"""Golden files: what one holds, how it is read, and what a runner reports about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from frameloom.core.errors import CheckpointError


@dataclass(frozen=True)
class ParityCase:
    """One golden file. The prefixes `weights.`, `in.` and `out.` are removed, weights are float32.

    `path` is the file itself, for cases that name another file beside it: the weights of a shared autoencoder, clips.
    """

    name: str
    config: dict[str, Any]
    weights: dict[str, Tensor]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    path: Path | None = None

    @property
    def kind(self) -> str:
        """The file's name without its folder and ending."""
        return self.name.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class ParityOutput:
    """One compared tensor. `ours` is None when it was not compared; `note` then says why.

    `deviation` names the entry of the list of deviations that says why it was not compared, or why `expected` is not
    the published result but what it should have been.
    """

    name: str
    ours: Tensor | None
    expected: Tensor
    tolerance: float
    note: str = ""
    deviation: str = ""


Run = Callable[[ParityCase], list[ParityOutput]]


@dataclass(frozen=True)
class Runner:
    """Runs one kind of golden file, recognised by its content, so that other sizes and settings run as well."""

    matches: Callable[[ParityCase], bool]
    run: Run


RUNNERS: list[Runner] = []


def golden(matches: Callable[[ParityCase], bool]) -> Callable[[Run], Run]:
    """Registers the decorated function as the runner of the files that `matches` knows."""

    def register(run: Run) -> Run:
        RUNNERS.append(Runner(matches, run))
        return run

    return register


Tolerance = float | Callable[[str, Tensor], float]

NUM_LAST_PLACES = 16


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def pick_prefixed(entry: Mapping[str, Any], start: str) -> Any:
    """The value of the one key that begins so; the rest of such a key counts what the value holds."""
    return next(value for key, value in entry.items() if key.startswith(start))


def largest(values: Tensor) -> float:
    """The largest finite magnitude; 0 for an empty tensor."""
    magnitudes = values.detach().double().abs()
    magnitudes = magnitudes[magnitudes.isfinite()]
    return float(magnitudes.max()) if magnitudes.numel() else 0.0


def above_rounding(tolerance: float) -> Callable[[str, Tensor], float]:
    """An absolute tolerance that is never below the rounding of the largest number: 1e-6 cannot be asked of 1e3.

    Two orders of the same sum differ by some units in the last place, in float32 by about 2e-6 of the largest number.
    """

    def allow(name: str, expected: Tensor) -> float:
        if not tolerance or not expected.is_floating_point():
            return tolerance
        return max(tolerance, NUM_LAST_PLACES * torch.finfo(expected.dtype).eps * largest(expected))

    return allow


def relative_to_largest(share: float) -> Callable[[str, Tensor], float]:
    """A tolerance of `share` times the largest number of the published tensor; 0 for a tensor of zeros."""
    return lambda name, expected: share * largest(expected)


def compare(
    name: str, ours: Tensor | None, expected: Tensor, tolerance: Tolerance, note: str = "", deviation: str = ""
) -> ParityOutput:
    """One tensor beside the published one. A number as tolerance is raised to the rounding; 0 means equal."""
    allowed = tolerance if callable(tolerance) else above_rounding(tolerance)
    return ParityOutput(name, ours, expected, allowed(name, expected), note, deviation)


def pair_outputs(
    case: ParityCase,
    ours: Mapping[str, Tensor | None],
    tolerance: Tolerance,
    deviations: Mapping[str, str] | None = None,
) -> list[ParityOutput]:
    """Every output of the file beside ours of the same name; one that we lack is not compared.

    `deviations` names the entry of the list of deviations for outputs that we do not make.
    """
    results = []
    for name, expected in case.outputs.items():
        note = "" if ours.get(name) is not None else "the runner of this kind of case makes no such output"
        results.append(compare(name, ours.get(name), expected, tolerance, note, (deviations or {}).get(name, "")))
    return results


def leave_out(name: str, deviation: str) -> ParityOutput:
    """An entry of a table that is not computed, for a reason in the list of deviations."""
    return ParityOutput(name, None, torch.zeros(0), 0.0, deviation=deviation)


Found = Iterable[tuple[str, Any, Any] | ParityOutput]
"""(name of a compared list, ours, the original's), numbers nested alike; or a finished comparison"""
CompareTable = Callable[[dict[str, Any]], Found]


def golden_table(*keys: str, in_cases: bool = False) -> Callable[[CompareTable], CompareTable]:
    """Registers the comparison of tables with these keys, or with these in the entries of `cases`; values are equal."""

    def matches(case: ParityCase) -> bool:
        listed = case.config.get("cases") if in_cases else [case.config]
        entry = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
        return entry.keys() >= set(keys)

    def register(compare_table: CompareTable) -> CompareTable:
        def run(case: ParityCase) -> list[ParityOutput]:
            found = compare_table(case.config)
            return [one if isinstance(one, ParityOutput) else compare_numbers(*one) for one in found]

        golden(matches)(run)
        return compare_table

    return register


def compare_numbers(name: str, ours: Any, expected: Any, tolerance: float = 0.0) -> ParityOutput:
    """Lists of numbers, nested alike; lengths that differ show up as another shape."""
    return compare(name, _to_tensor(ours), _to_tensor(expected), tolerance)


def compare_facts(name: str, ours: Any, expected: Any) -> ParityOutput:
    """Texts, ragged lists and other values that are equal or not: the error is the number of places that differ."""
    return ParityOutput(name, torch.tensor(float(_count_different(ours, expected))), torch.zeros(()), 0.0)


def _to_tensor(values: Any) -> Tensor:
    return values.detach().double() if isinstance(values, Tensor) else torch.as_tensor(values, dtype=torch.float64)


def _count_different(ours: Any, expected: Any) -> int:
    if isinstance(ours, Mapping) and isinstance(expected, Mapping):
        keys = ours.keys() | expected.keys()
        return sum(_count_different(ours.get(key, _ABSENT), expected.get(key, _ABSENT)) for key in keys)
    if isinstance(ours, (list, tuple)) and isinstance(expected, (list, tuple)):
        pairs = zip(ours, expected, strict=False)
        return sum(_count_different(*pair) for pair in pairs) + abs(len(ours) - len(expected))
    return int(bool(ours != expected))


_ABSENT = object()


_DOCUMENTS = {".md", ".txt"}


def list_goldens(folder: Path) -> tuple[list[Path], list[Path]]:
    """Golden files below `folder`, and files that are neither golden, nor a document, nor named in a golden table."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give a folder of golden files")
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    cases = [path for path in paths if path.suffix in _READERS]
    if not cases:
        raise CheckpointError(f"{folder}: holds no .safetensors or .json file; give a folder of golden cases")
    others = [path for path in paths if path.suffix not in _READERS and path.suffix not in _DOCUMENTS]
    # Clips lie beside the table that says what should be found in them.
    tables = [path.read_text(encoding="utf-8", errors="replace") for path in cases if path.suffix == ".json"]
    return cases, [path for path in others if not any(f'"{path.name}"' in table for table in tables)]


def read_golden(path: Path, folder: Path) -> ParityCase:
    return _READERS[path.suffix](path, name=path.relative_to(folder).with_suffix("").as_posix())


def read_case(path: Path, *, name: str) -> ParityCase:
    """One golden file of tensors; the metadata key `config` is JSON."""
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
        weights={
            key: tensor.float() if tensor.is_floating_point() else tensor
            for key, tensor in under(tensors, "weights.").items()
        },
        inputs=under(tensors, "in."),
        outputs=under(tensors, "out."),
        path=path,
    )


def read_beside(case: ParityCase, name: str) -> ParityCase:
    """Another golden file of the same folder, which a case names: its autoencoder."""
    if case.path is None:
        raise CheckpointError(f"{case.name}: needs {name}, which is in another file; read the case from a folder")
    return read_case(case.path.with_name(f"{name}.safetensors"), name=name)


def read_table(path: Path, *, name: str) -> ParityCase:
    """A golden file without tensors: its whole content is the config; what is no JSON object has no runner."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as a golden file ({error}); copy it again") from error
    return ParityCase(name, config if isinstance(config, dict) else {}, {}, {}, {}, path=path)


_READERS = {".safetensors": read_case, ".json": read_table}
