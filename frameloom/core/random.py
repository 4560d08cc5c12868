"""Keyed random numbers: every draw is a function of (seed, purpose, counters).

There is no state to save, so a resumed run draws the same numbers on any number of workers and processes. `stream`
gives a torch generator for one sample, `numpy_stream` a numpy one, and `uniform_at` one number per counter for millions
of rows at once.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def key(seed: int, purpose: str, *counters: int) -> int:
    """A 64-bit key; different for every different (seed, purpose, counters)."""
    text = "/".join([str(int(seed)), purpose, *(str(int(counter)) for counter in counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def stream(seed: int, purpose: str, *counters: int, device: str = "cpu") -> torch.Generator:
    """A private torch generator; drawing from it never touches the global one."""
    import torch

    generator = torch.Generator(device)
    # torch takes signed 64-bit seeds, so the top bit is dropped.
    generator.manual_seed(key(seed, purpose, *counters) & 0x7FFF_FFFF_FFFF_FFFF)
    return generator


def numpy_stream(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """The same idea for numpy: shuffles and integer draws on the host."""
    return np.random.Generator(np.random.PCG64(key(seed, purpose, *counters)))


def bits_at(base: int, counters: NDArray[np.integer]) -> NDArray[np.uint64]:
    """64 random bits per counter (splitmix64), vectorised: row 9 gets the same bits alone or among millions."""
    with np.errstate(over="ignore"):
        word = counters.astype(np.uint64) * _GOLDEN + np.uint64(base)
        word = (word ^ (word >> np.uint64(30))) * _MIX_1
        word = (word ^ (word >> np.uint64(27))) * _MIX_2
        return np.asarray(word ^ (word >> np.uint64(31)), dtype=np.uint64)


def uniform_at(base: int, counters: NDArray[np.integer]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per counter; `base` comes from `key`."""
    return (bits_at(base, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
