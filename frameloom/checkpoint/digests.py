"""Digests of the files of a checkpoint, which tell damage before a weight is used.

They are XXH3 in 128 bits: several times as fast as SHA-256, so that a resume waits for the disk and not for the
processor. Neither would stop a person who may write there: `state.json`, with the digests, lies beside the files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from xxhash import xxh3_128

from frameloom.checkpoint.lazy_tensors import LazyTensors
from frameloom.checkpoint.safetensors_file import write_safetensors
from frameloom.core.files import digest_file

__all__ = ["is_undamaged", "write_digested"]

_XXH3 = "xxh3:"


def write_digested(path: Path, tensors: LazyTensors) -> str:
    """Write a safetensors file and return its digest, with the name of its kind before it."""
    return _XXH3 + write_safetensors(path, tensors, digest=xxh3_128())


def is_undamaged(path: Path, digest: str) -> bool:
    """Whether the content has this digest; one without a kind is the SHA-256 of formats 1 and 2."""
    if not digest.startswith(_XXH3):
        return digest_file(path) == digest
    with path.open("rb") as file:
        return _XXH3 + hashlib.file_digest(file, xxh3_128).hexdigest() == digest
