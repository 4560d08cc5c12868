"""Files of a conversion: weights of any kind read, a single file or shards written, targets and disk space checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frameloom.checkpoint.model_folder import TENSORS, find_own, read_weights
from frameloom.core.errors import CheckpointError
from frameloom.core.files import atomic_file, digest_file, replace_folder
from frameloom.core.logging import get_logger
from frameloom.weights.files import (
    CONFIG,
    INDEX,
    SAFETENSORS,
    find_weights,
    format_index,
    is_pickle,
    name_shards,
    open_weights,
    plan_shards,
)
from frameloom.weights.lazy_tensors import LazyTensors, rename_tensors
from frameloom.weights.pickle_reader import open_pickle
from frameloom.weights.safetensors_file import open_safetensors, write_safetensors

# Names that torch.compile, FSDP and activation checkpointing put between those of the modules.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_PARALLEL = "module."  # DistributedDataParallel, and averaged weights of several trainers
# Readers of other libraries ask for this note before they open a file.
_FORMAT = {"format": "pt"}
_PIPELINE_PARTS = ("unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
_SPARE_BYTES = 16_000_000  # headers, an index, and what the file system needs itself
Advance = Callable[[int], object]
_log = get_logger(__name__)


@dataclass(frozen=True)
class Source:
    """Weights to convert. `kind`, `name` and `config` are those of one of our model folders and empty otherwise.

    `published` is the `config.json` that published weights came with; `stem` the name of their files.
    """

    path: Path
    tensors: LazyTensors
    files: tuple[Path, ...]
    stem: str
    kind: str = ""
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)


def open_source(path: Path, *, kind: str = "", section: str = "", prefer: Sequence[str] = ()) -> Source:
    """Find and open the weights at `path`; only headers are read. `section` and `prefer` choose within a pickle."""
    own = find_own(path)
    if own is not None:
        model = read_weights(own)
        files = (own / TENSORS, own / CONFIG)
        source = Source(path, model.tensors, files, "model", model.kind, model.name, model.config)
    else:
        found = find_weights(path, kind=kind)
        open_one = lambda file: (  # noqa: E731
            open_pickle(file, section=section, prefer=prefer) if is_pickle(file) else open_safetensors(file)
        )
        tensors = open_weights(found, open_one)
        source = Source(found.path, tensors, found.files, found.stem, published=found.config)
    if section and not any(is_pickle(file) for file in source.files):
        raise CheckpointError(f"{path}: has no sections, all its tensors are on one level; leave --section out")
    return source


def strip_wrappers(tensors: LazyTensors, *, where: str) -> LazyTensors:
    """Take out the names of wrappers wherever they stand, and a leading `module.` that all tensors have."""
    for part in _WRAPPERS:
        # Out of a dotted name where it is a whole component.
        cut = lambda name, part=part: f".{name}".replace(f".{part}", ".").removeprefix(".")  # noqa: E731
        tensors = _strip(tensors, part, cut, where=where)
    while tensors and all(name.startswith(_PARALLEL) for name in tensors):
        tensors = _strip(tensors, _PARALLEL, lambda name: name.removeprefix(_PARALLEL), where=where)
    return tensors


def strip_prefixes(tensors: LazyTensors, prefixes: Sequence[str], *, where: str) -> LazyTensors:
    """Take each prefix off the names that begin with it; one that no name begins with is an error."""
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in tensors):
            first = ", ".join(sorted(tensors)[:3])
            raise CheckpointError(f"{where}: no tensor begins with the prefix '{prefix}' (first: {first}); check it")
        tensors = _strip(tensors, prefix, lambda name, prefix=prefix: name.removeprefix(prefix), where=where)  # type: ignore[misc]
    return tensors


def _strip(tensors: LazyTensors, part: str, rename: Callable[[str], str], *, where: str) -> LazyTensors:
    num_changed = sum(rename(name) != name for name in tensors)
    if not num_changed:
        return tensors
    _log.info("%s: stripped '%s' from %d of %d names", where, part, num_changed, len(tensors))
    return rename_tensors(tensors, rename, where=where)


def check_target(
    out: Path, sources: Sequence[Path], *, is_folder: bool, is_pipeline: bool = False, may_replace: bool = False
) -> None:
    """CheckpointError before anything is read when the result could not be put in its place, or would destroy one."""
    files = [file.resolve() for file in sources]
    if not is_folder and out.suffix.lower() != SAFETENSORS:
        raise CheckpointError(f"{out}: one file is to be written; give it a name that ends with {SAFETENSORS}")
    if not out.exists():
        return
    if out.is_dir() != is_folder:
        found, wanted = ("a folder", "a file") if out.is_dir() else ("a file", "a folder")
        raise CheckpointError(f"{out}: is {found}, and {wanted} is to be written; choose another name or another --to")
    if out.resolve() in files or any(file.is_relative_to(out.resolve()) for file in files):
        raise CheckpointError(f"{out}: holds what is to be converted; write to another place")
    if not may_replace:
        raise CheckpointError(f"{out}: is there already; choose another name, or replace it with --force")
    names = {path.name: path.is_dir() for path in sorted(out.iterdir())} if is_folder else {}
    written = (CONFIG, "model_index.json")
    others = [
        name
        for name, is_dir in names.items()
        if (not is_pipeline or name not in _PIPELINE_PARTS)
        and (is_dir or (name not in written and not name.endswith((SAFETENSORS, INDEX))))
    ]
    if others:
        raise CheckpointError(
            f"{out}: holds {', '.join(others[:3])}, which no conversion wrote, so it is not replaced; choose another "
            "folder"
        )


def check_space(out: Path, num_bytes: int) -> None:
    """CheckpointError when the disk cannot hold the result, which stands beside what it replaces for a moment."""
    folder = next(parent for parent in out.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _SPARE_BYTES:
        raise CheckpointError(
            f"{out}: needs {num_bytes:,} bytes, and {free:,} are free in {folder}; free some space, choose another "
            "disk, or a smaller --dtype"
        )


def write_single(out: Path, tensors: LazyTensors, *, advance: Advance) -> dict[Path, str]:
    """One file; returns its digest."""
    with atomic_file(out) as temporary:
        digest = _write_checked(temporary, tensors, {**tensors.metadata, **_FORMAT}, advance)
    return {out: digest}


def write_sharded(
    folder: Path,
    tensors: LazyTensors,
    *,
    stem: str,
    max_bytes: int,
    config: Mapping[str, Any],
    advance: Advance = lambda num_bytes: None,
) -> dict[Path, str]:
    """Shards, their index, and the `config.json` of other libraries if there is one; returns digests of the shards."""
    shards = plan_shards(tensors, max_bytes)
    parts = dict(zip(name_shards(stem, len(shards)), shards, strict=True))
    digests = {}
    with replace_folder(folder) as temporary:
        for name, part in parts.items():
            digests[folder / name] = _write_checked(temporary / name, part, {**tensors.metadata, **_FORMAT}, advance)
        if len(parts) > 1:
            (temporary / f"{stem}{SAFETENSORS}{INDEX}").write_text(format_index(parts))
        if config:
            (temporary / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")
    return digests


def _write_checked(path: Path, tensors: LazyTensors, metadata: Mapping[str, str], advance: Advance) -> str:
    """Write, read back and compare: detects silent write errors before training starts."""
    digest = write_safetensors(path, tensors, metadata=metadata, advance=advance)
    if digest_file(path) != digest:
        raise CheckpointError(f"{path}: what was read back is not what was written; check the disk")
    return digest
