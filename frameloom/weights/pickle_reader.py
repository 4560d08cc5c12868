"""Reading PyTorch's own files (`.pt`, `.pth`, `.bin`, `.ckpt`) for conversion alone, with weights-only loading.

Such a file is a program for a small machine that can call any function. Weights-only loading refuses every call but
those that build tensors; what needs more is refused here too.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frameloom.core.errors import CheckpointError
from frameloom.core.logging import get_logger
from frameloom.weights.lazy_tensors import LazyTensors, PendingTensor

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
TOP = "."  # the section of tensors that lie at the top of a file, in no table of their own
_MAX_DEPTH = 4
# Optimizer moments look like weights but are not a model.
_NOT_WEIGHTS = re.compile(r"optim|sched|scaler|rng|random", re.IGNORECASE)
_GLOBAL = re.compile(r"GLOBAL (\S+) (?:was not an allowed global|whose module)")
_log = get_logger(__name__)


def open_pickle(path: Path, *, section: str = "", prefer: Sequence[str] = ()) -> LazyTensors:
    """The tensors of one section. With none named, the first of `prefer` that has tensors, else the only one."""
    content, is_mapped = _load(path)
    tables = _walk(content, "", 0)
    sections = {name: table for name, table in tables if any(isinstance(value, Tensor) for value in table.values())}
    if not sections:
        what = f"a single {type(content).__name__}"
        if isinstance(content, Mapping):
            what = f"a table with {', '.join(repr(key) for key in list(content)[:5]) or 'nothing in it'}"
        raise CheckpointError(f"{path}: holds no table of tensors ({what}); give a state dict")
    chosen = _choose(path, sections, section, prefer)
    if len(sections) > 1:
        _log.info("%s: taking section %s of %s", path, chosen, ", ".join(sections))
    table = sections[chosen]
    others = [str(name) for name, value in table.items() if not isinstance(value, Tensor | Mapping)]
    if others:
        _log.info("%s: left out %d entries that are no tensors: %s", path, len(others), ", ".join(others[:8]))
    return _pend(path, {name: value for name, value in table.items() if isinstance(value, Tensor)}, is_mapped)


def _load(path: Path) -> tuple[Any, bool]:
    """The file's content, and whether its tensors are still on disk (mapped) or already in memory."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); check the path") from error
    is_zip = magic == b"PK\x03\x04"
    if is_zip:
        _check_archive(path)
    elif not magic.startswith(b"\x80"):
        raise CheckpointError(
            f"{path}: not a file of torch.save (it begins with {magic!r}; MindSpore's .ckpt is another format); "
            "give a PyTorch or safetensors file"
        )
    else:
        _log.warning("%s: written by PyTorch before 1.6, so all of it is read into memory at once", path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip), is_zip
    except Exception as error:  # a damaged file can fail anywhere in the unpickler
        raise _refuse(path, error) from error


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            order = next((archive.read(one)[:16] for one in entries if one.filename.endswith("/byteorder")), b"little")
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{path}: damaged or incomplete archive ({error}); copy or download it again") from error
    if any(one.filename.endswith("/constants.pkl") for one in entries):
        raise CheckpointError(f"{path}: a TorchScript program, not weights; save its state_dict() with torch.save")
    if any(one.compress_type != zipfile.ZIP_STORED for one in entries):
        raise CheckpointError(f"{path}: its tensors are compressed, which torch.save never does; download it again")
    if order != b"little":
        raise CheckpointError(f"{path}: written on a big-endian machine; save it again on a usual one")


def _refuse(path: Path, error: Exception) -> CheckpointError:
    text = str(error)
    if (found := _GLOBAL.search(text)) or "weights_only" in text.lower() or "weights only" in text.lower():
        what = f"the object {found[1]}" if found else "objects that are no tensors"
        return CheckpointError(
            f"{path}: refused, it needs {what} to open, and such a file can run any code; where you trust it, load it "
            "there and save the state dict alone with torch.save"
        )
    return CheckpointError(f"{path}: cannot be read ({' '.join(text.split())[:200]}); copy or download it again")


def _walk(value: Any, name: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(dotted name, table) in the order of the file."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value) or depth > _MAX_DEPTH:
        return
    yield name or TOP, value
    for key, inner in value.items():
        if not _NOT_WEIGHTS.search(key):
            yield from _walk(inner, f"{name}.{key}" if name else key, depth + 1)


def _choose(path: Path, sections: Mapping[str, Mapping[str, Any]], wanted: str, prefer: Sequence[str]) -> str:
    if wanted in sections:
        return wanted
    listing = ""
    for name, table in sections.items():
        tensors = [value for value in table.values() if isinstance(value, Tensor)]
        num_bytes = sum(one.numel() * one.element_size() for one in tensors)
        listing += f"\n  {name}: {len(tensors)} tensors, {num_bytes:,} bytes"
    if wanted:
        raise CheckpointError(f"{path}: has no section '{wanted}'; choose one with --section:{listing}")
    for name in prefer:
        if name in sections:
            return name
    if len(sections) > 1:
        raise CheckpointError(f"{path}: holds several sets of tensors; choose one with --section:{listing}")
    return next(iter(sections))


def _pend(path: Path, tensors: Mapping[str, Tensor], is_mapped: bool) -> LazyTensors:
    """A tensor with several names is kept under the first; the others are tied to it."""
    file_bytes = path.stat().st_size
    firsts: dict[tuple[Any, ...], str] = {}
    pending: dict[str, PendingTensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(f"{path}: '{name}' is no plain tensor ({type(tensor).__name__}, {tensor.layout})")
        if tensor.is_meta:
            raise CheckpointError(f"{path}: '{name}' was saved without its numbers (on the meta device); save it again")
        if tensor.nbytes > file_bytes:
            raise CheckpointError(
                f"{path}: '{name}' repeats few numbers to {tensor.nbytes:,} bytes, more than the file has; "
                "save it again after contiguous()"
            )
        if tensor.numel():
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            first = firsts.setdefault(place, name)
            if first != name:
                tied[name] = first
                continue
        pending[name] = PendingTensor(tensor.dtype, tuple(tensor.shape), partial(_copy, tensor, is_mapped))
    return LazyTensors(pending, tied=tied)


def _copy(tensor: Tensor, is_mapped: bool) -> Tensor:
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    if is_mapped:
        # Let go of the mapped file under the tensor, which would stay in memory until all of the file is; it can come
        # back. Other memory would lose its content.
        libc = ctypes.CDLL(None, use_errno=True)
        storage = tensor.untyped_storage()
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and end > start:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
    return copy
