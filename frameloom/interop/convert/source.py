"""What a conversion reads: weights of any kind, pickles included, under names without the traces of wrappers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from frameloom.checkpoint.model_folder import TENSORS, find_own, read_weights
from frameloom.core.errors import CheckpointError
from frameloom.core.logging import get_logger
from frameloom.weights.files import CONFIG, find_weights, is_pickle, open_weights
from frameloom.weights.lazy_tensors import LazyTensors, rename_tensors
from frameloom.weights.pickle_reader import open_pickle
from frameloom.weights.safetensors_file import open_safetensors

__all__ = ["Source", "open_source", "strip_prefixes", "strip_wrappers"]


# Names that torch.compile, FSDP and activation checkpointing put between those of the modules.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_PARALLEL = "module."  # DistributedDataParallel, and averaged weights of several trainers
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
        tensors = open_weights(found, partial(_open_file, section=section, prefer=prefer))
        source = Source(found.path, tensors, found.files, found.stem, published=found.config)
    if section and not any(is_pickle(file) for file in source.files):
        raise CheckpointError(f"{path}: has no sections, all its tensors are on one level; leave --section out")
    return source


def _open_file(path: Path, *, section: str, prefer: Sequence[str]) -> LazyTensors:
    return open_pickle(path, section=section, prefer=prefer) if is_pickle(path) else open_safetensors(path)


def strip_wrappers(tensors: LazyTensors, *, where: str) -> LazyTensors:
    """Take out the names of wrappers wherever they stand, and a leading `module.` that all tensors have."""
    for part in _WRAPPERS:
        tensors = _strip(tensors, part, partial(_cut, part), where=where)
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


def _cut(part: str, name: str) -> str:
    """`part` out of a dotted name where it is a whole component."""
    return f".{name}".replace(f".{part}", ".").removeprefix(".")


def _strip(tensors: LazyTensors, part: str, rename: Callable[[str], str], *, where: str) -> LazyTensors:
    num_changed = sum(rename(name) != name for name in tensors)
    if not num_changed:
        return tensors
    _log.info("%s: stripped '%s' from %d of %d names", where, part, num_changed, len(tensors))
    return rename_tensors(tensors, rename, where=where)
