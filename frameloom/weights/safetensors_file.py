"""Reading and writing safetensors files tensor by tensor: the header is read and checked alone.

    8 bytes   length of the header, little-endian
    header    JSON: name -> dtype, shape, data_offsets; `__metadata__` holds strings; padded with spaces to 8 bytes
    data      the tensors, little-endian, without gaps

Plain reads instead of a memory map: mapped pages count as used memory, and truncation of a mapped file is a SIGBUS.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from frameloom.core.errors import CheckpointError
from frameloom.weights.lazy_tensors import LazyTensors, PendingTensor

METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000
# In the order of the library, which puts the last ones first into a file.
_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES.values())}


def open_safetensors(path: Path) -> LazyTensors:
    """Read and check the header. A note that names a tensor is a tied name, as `safetensors.save_model` writes it."""
    header, data_start, data_bytes = _read_header(path)
    metadata = header.pop(METADATA, None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, f"{METADATA} is not a table of texts")
    pending: dict[str, PendingTensor] = {}
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: _start_of(path, *item)):
        one, end = _parse_entry(path, name, entry, data_start, position)
        pending[name], position = one, end
    if position != data_bytes:
        raise _damaged(path, f"its tensors take {position:,} bytes and the file has {data_bytes:,} for them")
    tied = {name: kept for name, kept in metadata.items() if kept in pending and name not in pending}
    notes = {name: text for name, text in metadata.items() if name not in tied}
    return LazyTensors(pending, tied=tied, metadata=notes)


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := next((name for name in names if len(set(names)) < len(names) and names.count(name) > 1), None):
            raise _damaged(path, f"its header has '{twice}' twice")
        return dict(pairs)

    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise _damaged(path, f"its first bytes announce a header of {header_bytes:,} bytes in {file_bytes:,}")
            header = json.loads(file.read(header_bytes), object_pairs_hook=refuse_duplicates)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    return header, 8 + header_bytes, file_bytes - 8 - header_bytes


def _start_of(path: Path, name: str, entry: Any) -> tuple[int, int]:
    match entry:
        case {"data_offsets": [int(start), int(end)]}:
            return start, end
    raise _damaged(path, f"'{name}' has no place in the file")


def _parse_entry(path: Path, name: str, entry: Any, data_start: int, position: int) -> tuple[PendingTensor, int]:
    """The tensor that should begin at `position`, and where it ends."""
    start, end = _start_of(path, name, entry)
    code, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise _damaged(path, f"'{name}' has the shape {shape!r}")
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise CheckpointError(f"{path}: '{name}' has the dtype {code!r}; readable are {', '.join(_DTYPES)}")
    if start != position or end - start != math.prod(shape) * dtype.itemsize:
        raise _damaged(path, f"'{name}' ({code} {shape}) should begin at byte {position:,}, it is at {start:,}-{end:,}")
    load = partial(_read_tensor, path, data_start + start, dtype, tuple(shape))
    return PendingTensor(dtype, tuple(shape), load), end


def _read_tensor(path: Path, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    raw = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    view = raw.numpy().data
    with path.open("rb") as file:
        file.seek(start)
        done = 0
        while done < len(view):
            num_read = file.readinto(view[done:])
            if not num_read:
                raise _damaged(path, "it became shorter while it was read")
            done += num_read
    return raw.view(dtype).reshape(shape)


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: not a complete safetensors file, {problem}; copy or download it again")


class Digest(Protocol):
    """What `hashlib` and `xxhash` make."""

    def update(self, data: memoryview | bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def write_safetensors(
    path: Path,
    tensors: LazyTensors,
    *,
    metadata: Mapping[str, str] | None = None,
    advance: Callable[[int], object] = lambda num_bytes: None,
    digest: Digest | None = None,
) -> str:
    """Write tensor by tensor, byte for byte what the library writes, and return the digest, SHA-256 by default.

    Tied names are written into the metadata. `advance` is called with the bytes of each tensor written.
    """
    for name, pending in tensors.pending.items():
        if pending.dtype not in _RANKS:
            raise CheckpointError(
                f"{name}: safetensors cannot hold {pending.dtype}; convert it with --dtype or leave it out"
            )
    names = sorted(tensors.pending, key=lambda name: (-_RANKS[tensors.pending[name].dtype], name))
    digest = digest or hashlib.sha256()
    with path.open("wb") as file:
        header = _format_header(names, tensors, {**(metadata or {}), **tensors.tied})
        digest.update(header)
        file.write(header)
        for name in names:
            pending = tensors.pending[name]
            data = _to_bytes(name, pending)
            digest.update(data)
            file.write(data)
            advance(pending.num_bytes)
    return digest.hexdigest()


def _format_header(names: list[str], tensors: LazyTensors, metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name in names:
        pending = tensors.pending[name]
        end = position + pending.num_bytes
        shape = list(pending.shape)
        header[name] = {"dtype": _CODES[pending.dtype], "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _to_bytes(name: str, pending: PendingTensor) -> memoryview:
    tensor = pending.load()
    if tensor.dtype != pending.dtype or tuple(tensor.shape) != pending.shape:
        raise CheckpointError(
            f"{name}: announced as {pending.dtype} {pending.shape}, read as {tensor.dtype} {tuple(tensor.shape)}; "
            "the source changed meanwhile"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
