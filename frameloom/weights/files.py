"""Weights at a path: a file, an index of shards, a published folder, or a part of a whole pipeline.

    model-00001-of-00002.safetensors   model-00002-of-00002.safetensors
    model.safetensors.index.json       {"metadata": {"total_size": BYTES}, "weight_map": {NAME: FILE}}

An index comes from strangers: the files it names must lie beside it, and it must agree with what they hold.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frameloom.core.errors import CheckpointError, DataError
from frameloom.core.paths import safe_join
from frameloom.core.text_files import read_object
from frameloom.weights.lazy_tensors import LazyTensors, PendingTensor
from frameloom.weights.pickle_reader import PICKLES
from frameloom.weights.safetensors_file import open_safetensors

CONFIG = "config.json"
SAFETENSORS = ".safetensors"
INDEX = ".index.json"
# Sub-folders of published pipelines and of other trainers' checkpoints.
_PARTS: dict[str, tuple[str, ...]] = {
    "denoiser": ("transformer", "unet", "model", "transformer_ema", "unet_ema", "model_ema"),
    "vae": ("vae", "vae_ema"),
}
# A folder may also hold variants (`.fp16.`) or other models; these names are the ones that libraries open by default.
_USUAL = ("diffusion_pytorch_model", "model", "pytorch_model")
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.\w+")


@dataclass(frozen=True)
class WeightFiles:
    """The files of one model: `path` is the file or index to name to people, `files` hold the tensors.

    `config` is the published `config.json` beside them; empty when there is none.
    """

    path: Path
    files: tuple[Path, ...]
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """`diffusion_pytorch_model` for a file, a set of shards and an index of that name."""
        name = self.path.name.removesuffix(INDEX)
        if match := _NUMBERED.fullmatch(name):
            return match["stem"]
        return Path(name).stem

    @property
    def is_pickle(self) -> bool:
        return any(is_pickle(file) for file in self.files)


def is_pickle(path: Path) -> bool:
    return path.suffix.lower() in PICKLES


def find_weights(path: Path, *, kind: str = "") -> WeightFiles:
    """The one set of weights at `path`; CheckpointError lists the candidates when there is none or several.

    `kind` (denoiser or vae) chooses the part of a pipeline.
    """
    if path.is_dir():
        return _find_in_folder(path, kind)
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file or folder; name a model folder, a run folder or a .safetensors file"
        )
    config = read_config(path.parent) if (path.parent / CONFIG).is_file() else {}
    if path.name.endswith(INDEX):
        return WeightFiles(path, tuple(read_index(path).files), config)
    if path.suffix.lower() == SAFETENSORS or is_pickle(path):
        return WeightFiles(path, (path,), config)
    raise CheckpointError(
        f"{path}: not a file of weights by its name; expected .safetensors, {SAFETENSORS}{INDEX}, {', '.join(PICKLES)}"
    )


def open_weights(found: WeightFiles, open_file: Callable[[Path], LazyTensors] = open_safetensors) -> LazyTensors:
    """All tensors of a set of files; nothing but headers is read."""
    if found.path.name.endswith(INDEX):
        return _open_sharded(read_index(found.path), open_file)
    return _join_parts({file: open_file(file) for file in found.files})


def refuse_pickle(found: WeightFiles) -> None:
    """Training and sampling never open a pickle; say how it becomes a file that they do open."""
    if found.is_pickle:
        out = found.path.parent / f"{found.stem}{SAFETENSORS}"
        raise CheckpointError(
            f"{found.path}: this is a pickle, which can run code when opened; convert it first: "
            f"frameloom convert {shlex.quote(str(found.path))} {shlex.quote(str(out))}"
        )


def _find_in_folder(folder: Path, kind: str) -> WeightFiles:
    if sets := _list_sets(folder):
        choice = [one for one in sets if one.stem in _USUAL] or sets
        if len(choice) > 1:
            listing = ", ".join(one.path.name for one in choice)
            raise CheckpointError(f"{folder}: holds several sets of weights ({listing}); name the file itself")
        config = read_config(folder) if (folder / CONFIG).is_file() else {}
        return WeightFiles(choice[0].path, choice[0].files, config)
    names = _PARTS.get(kind) or [name for parts in _PARTS.values() for name in parts]
    parts = [folder / name for name in names if (folder / name).is_dir() and _list_sets(folder / name)]
    if len(parts) == 1:
        return _find_in_folder(parts[0], kind)
    if parts:
        listing = ", ".join(str(part) for part in parts)
        raise CheckpointError(f"{folder}: holds several models; name one of them: {listing}")
    raise CheckpointError(
        f"{folder}: holds no weights: neither {CONFIG} of a model folder, nor export/{CONFIG} of a finished run, nor "
        f"{SAFETENSORS} files here or in a part of a pipeline ({', '.join(names)})"
    )


def _list_sets(folder: Path) -> list[WeightFiles]:
    """All sets of weights of a folder; pickles count only where there is no safetensors file."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for suffixes in ((SAFETENSORS,), PICKLES):
        held = [path for path in files if Path(path.name.removesuffix(INDEX)).suffix.lower() in suffixes]
        if held:
            return _group(held)
    return []


def _group(files: Iterable[Path]) -> list[WeightFiles]:
    """Indexes with their shards, numbered shards without an index, and single files."""
    files = list(files)
    sets = [WeightFiles(path, tuple(read_index(path).files)) for path in files if path.name.endswith(INDEX)]
    listed = {file for one in sets for file in (one.path, *one.files)}
    numbered: dict[tuple[str, int], list[Path]] = {}
    for path in (path for path in files if path not in listed):
        if match := _NUMBERED.fullmatch(path.name):
            numbered.setdefault((match["stem"], int(match["total"])), []).append(path)
        else:
            sets.append(WeightFiles(path, (path,)))
    for (_, total), shards in numbered.items():
        if len(shards) != total:
            raise CheckpointError(
                f"{shards[0]}: one of {total} shards, but {len(shards)} are there; download the others"
            )
        sets.append(WeightFiles(shards[0], tuple(shards)))
    return sets


def read_config(folder: Path) -> dict[str, Any]:
    return read_object(folder / CONFIG, error=CheckpointError, fix="export or download it again")


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
        if Path(name).name == name:
            # A link of the Hugging Face cache leads from REPO/snapshots/REVISION/ into REPO/blobs.
            link = folder / name
            snapshots = next((parent for parent in link.absolute().parents if parent.name == "snapshots"), None)
            if snapshots and link.is_symlink() and link.resolve().parent == (snapshots.parent / "blobs").resolve():
                return link
        try:
            return safe_join(folder, name, where=str(self.path))
        except DataError as error:
            raise CheckpointError(str(error)) from error


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


def _open_sharded(index: ShardIndex, open_file: Callable[[Path], LazyTensors]) -> LazyTensors:
    """The tensors of all shards, after the index has been checked against each of them."""
    for file in index.files:
        if not file.is_file():
            num_tensors = sum(name == file.name for name in index.weight_map.values())
            raise CheckpointError(
                f"{index.path}: names {file.name}, which is not there ({num_tensors} tensors); download it again"
            )
    parts = {file: open_file(file) for file in index.files}
    tensors = _join_parts(parts)
    holders = {name: file for file, part in parts.items() for name in part}
    for name, file_name in index.weight_map.items():
        found = holders.pop(name, None)
        if found is None or found != index.resolve(file_name):
            holder = "no file does" if found is None else f"{found.name} does"
            raise CheckpointError(
                f"{index.path}: says that {file_name} holds '{name}', but {holder}; download index and shards again"
            )
    extra = [name for name, file in holders.items() if name not in parts[file].tied]
    if extra:
        raise CheckpointError(
            f"{index.path}: does not list '{extra[0]}' ({len(extra)} such tensors), which "
            f"{holders[extra[0]].name} holds; download index and shards again"
        )
    # Tied tensors are counted once by some writers and each time by others; ColossalAI writes MiB.
    once, each = tensors.num_bytes, tensors.untied().num_bytes
    total = once if index.total is None else index.total
    in_mib = any(math.isclose(total, num_bytes / 2**20, rel_tol=1e-6) for num_bytes in (once, each))
    if total not in (once, each) and not in_mib:
        raise CheckpointError(
            f"{index.path}: says that all tensors take {total:,} bytes, the files hold {once:,}; download the "
            "shards again, or correct metadata.total_size if they are right"
        )
    return tensors


def _join_parts(parts: Mapping[Path, LazyTensors]) -> LazyTensors:
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


def plan_shards(tensors: LazyTensors, max_bytes: int) -> list[LazyTensors]:
    """Cut in the order of the names given, each part at most `max_bytes`; a larger tensor gets its own part."""
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
