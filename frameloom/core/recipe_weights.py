"""Weights that are computed instead of stored: exact integers from the key, the same on every machine.

Golden cases with wide layers name a seed and a gain and list their keys and shapes; this is the
generator they were made with (a multiplicative hash of the flat index, salted with the key's CRC-32).
"""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import NDArray

_WORD = 2**32


def draw_recipe_weight(key: str, shape: tuple[int, ...], *, seed: int = 0, gain: float = 1.0) -> NDArray[np.float32]:
    """The tensor of state-dict entry `key`: fan-scaled uniform, norm scales around 1, other vectors around 0."""
    unit = _hash_to_unit(_salt(key, seed), math.prod(shape)).reshape(shape)
    if len(shape) >= 2:
        unit = unit * np.sqrt(12.0 / math.prod(shape[1:])) * gain
    elif key.endswith("weight"):
        unit = 1.0 + 0.4 * unit
    else:
        unit = 0.2 * unit
    return np.asarray(unit, dtype=np.float32)


def _salt(key: str, seed: int) -> int:
    start = (zlib.crc32(key.encode()) + 7919 * seed) % _WORD
    return (40503 * start + 12345) % _WORD


def _hash_to_unit(salt: int, count: int) -> NDArray[np.float64]:
    """`count` numbers in [-0.5, 0.5)."""
    # 64-bit words hold every product of a 32-bit word and a 32-bit constant, so no step loses a bit.
    mask = np.uint64(_WORD - 1)
    word = (np.arange(count, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(salt)) & mask
    word = ((word ^ (word >> np.uint64(15))) * np.uint64(2246822519)) & mask
    word ^= word >> np.uint64(13)
    return word.astype(np.float64) / _WORD - 0.5
