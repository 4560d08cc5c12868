"""Indexes of sharded weights: which tensor is in which file, as published repositories write it.

    model-00001-of-00002.safetensors   model-00002-of-00002.safetensors
    model.safetensors.index.json       {"metadata": {"total_size": BYTES}, "weight_map": {NAME: FILE}}

An index comes from strangers: the files it names must lie beside it, and it must agree with what they hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frameloom.core.errors import CheckpointError, DataError
from frameloom.core.paths import safe_join
from frameloom.weights.lazy_tensors import LazyTensors, PendingTensor

INDEX = ".index.json"
Open = Callable[[Path], LazyTensors]


@dataclass(frozen=True)
class ShardIndex:
    """`weight_map` is tensor name -> file name; `total` is the size that the index claims, if it claims one."""

    path: Path
    weight_map: dict[str, str]
    total: float | None

    @property
    def files(self) -> list[Path]:
        """The named files in order of their names; CheckpointError for a name that leads elsewhere."""
        return [self.resolve(name) for name in sorted(set(self.weight_map.values()))]

    def resolve(self, name: str) -> Path:
        folder = self.path.parent
        if Path(name).name == name and _is_hub_link(folder / name):
            return folder / name
        try:
            return safe_join(folder, name, where=str(self.path))
        except DataError as error:
            raise CheckpointError(str(error)) from error


def _is_hub_link(path: Path) -> bool:
    """Whether this is a link of the Hugging Face cache: REPO/snapshots/REVISION/... leads into REPO/blobs."""
    for parent in path.absolute().parents:
        if parent.name == "snapshots":
            return path.is_symlink() and path.resolve().parent == (parent.parent / "blobs").resolve()
    return False


def read_index(path: Path) -> ShardIndex:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error}); copy the index again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path}: has no table 'weight_map' of tensor names and file names; copy the index again")
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    is_number = isinstance(total, int | float) and not isinstance(total, bool)
    return ShardIndex(path, weight_map, total if is_number else None)


def open_sharded(index: ShardIndex, open_file: Open) -> LazyTensors:
    """The tensors of all shards, after the index has been checked against each of them."""
    for file in index.files:
        if not file.is_file():
            num_tensors = sum(name == file.name for name in index.weight_map.values())
            raise CheckpointError(
                f"{index.path}: names {file.name}, which is not there ({num_tensors} tensors); download it again"
            )
    parts = {file: open_file(file) for file in index.files}
    tensors = join_parts(parts)
    _check_listing(index, parts)
    _check_total(index, tensors)
    return tensors


def join_parts(parts: Mapping[Path, LazyTensors]) -> LazyTensors:
    """Tensors of several files as one; a name that two files hold is an error."""
    pending: dict[str, PendingTensor] = {}
    tied: dict[str, str] = {}
    metadata: dict[str, str] = {}
    owners: dict[str, Path] = {}
    for file, part in parts.items():
        for name in part:
            if name in owners:
                raise CheckpointError(
                    f"{file}: holds '{name}', and so does {owners[name].name}; remove the file that is too many"
                )
            owners[name] = file
        pending |= part.pending
        tied |= part.tied
        metadata |= part.metadata
    return LazyTensors(pending, tied=tied, metadata=metadata)


def _check_listing(index: ShardIndex, parts: Mapping[Path, LazyTensors]) -> None:
    holders = {name: file for file, part in parts.items() for name in part}
    for name, file_name in index.weight_map.items():
        found = holders.pop(name, None)
        if found is None or found != index.resolve(file_name):
            place = "no file does" if found is None else f"{found.name} does"
            raise CheckpointError(
                f"{index.path}: says that {file_name} holds '{name}', but {place}; download index and shards again"
            )
    extra = [name for name, file in holders.items() if name not in parts[file].tied]
    if extra:
        raise CheckpointError(
            f"{index.path}: does not list '{extra[0]}' ({len(extra)} such tensors), which "
            f"{holders[extra[0]].name} holds; download index and shards again"
        )


def _check_total(index: ShardIndex, tensors: LazyTensors) -> None:
    """Tied tensors are counted once by some writers and each time by others; ColossalAI writes MiB."""
    if index.total is None:
        return
    once, each = tensors.num_bytes, tensors.untied().num_bytes
    in_mib = any(math.isclose(index.total, total / 2**20, rel_tol=1e-6) for total in (once, each))
    if index.total not in (once, each) and not in_mib:
        raise CheckpointError(
            f"{index.path}: says that all tensors take {index.total:,} bytes, the files hold {once:,}; download the "
            "shards again, or correct metadata.total_size if they are right"
        )


def plan_shards(tensors: LazyTensors, max_bytes: int) -> list[LazyTensors]:
    """Cut in the order of the names given, each part at most `max_bytes`; a larger tensor gets a part of its own."""
    groups: list[dict[str, PendingTensor]] = [{}]
    num_bytes = 0
    for name, pending in tensors.pending.items():
        if groups[-1] and num_bytes + pending.num_bytes > max_bytes:
            groups.append({})
            num_bytes = 0
        groups[-1][name] = pending
        num_bytes += pending.num_bytes
    return [
        LazyTensors(group, tied={name: kept for name, kept in tensors.tied.items() if kept in group})
        for group in groups
    ]


def name_shards(stem: str, num_shards: int) -> list[str]:
    if num_shards == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]


def format_index(parts: Mapping[str, LazyTensors]) -> str:
    """The index of files by name. Tied names are left to the files' own notes: loaders look for what is listed."""
    weight_map = {name: file for file, part in parts.items() for name in part.pending}
    total = sum(part.num_bytes for part in parts.values())
    content: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2) + "\n"
