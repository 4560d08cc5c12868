"""Reading golden files: tensors or tables with a configuration, and what lies beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from frameloom.core.errors import CheckpointError
from frameloom.core.parity import ParityCase


class _ReadCase(Protocol):
    def __call__(self, path: Path, *, name: str) -> ParityCase: ...


_DOCUMENTS = {".md", ".txt"}


def list_goldens(folder: Path) -> tuple[list[Path], list[Path]]:
    """Golden files below `folder`, and files that are neither golden, nor a document, nor named in a golden table."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give a folder of golden files")
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path, folder))
    cases = [path for path in paths if path.suffix in _READERS]
    if not cases:
        raise CheckpointError(f"{folder}: holds no .safetensors or .json file; give a folder of golden cases")
    others = [path for path in paths if path.suffix not in _READERS and path.suffix not in _DOCUMENTS]
    # Clips lie beside the table that says what should be found in them.
    tables = [path.read_text(encoding="utf-8", errors="replace") for path in cases if path.suffix == ".json"]
    return cases, [path for path in others if not any(f'"{path.name}"' in table for table in tables)]


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def read_cases(folder: Path) -> Iterator[ParityCase]:
    for path in list_goldens(folder)[0]:
        yield read_golden(path, folder)


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
        weights={key: _to_float32(tensor) for key, tensor in _strip(tensors, "weights.").items()},
        inputs=_strip(tensors, "in."),
        outputs=_strip(tensors, "out."),
        path=path,
    )


def read_table(path: Path, *, name: str) -> ParityCase:
    """A golden file without tensors: its whole content is the config; what is no JSON object has no runner."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as a golden file ({error}); copy it again") from error
    return ParityCase(name, config if isinstance(config, dict) else {}, {}, {}, {}, path=path)


_READERS: dict[str, _ReadCase] = {".safetensors": read_case, ".json": read_table}


def _strip(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
