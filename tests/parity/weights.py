"""Weights of golden cases: stored, or computed by exact integers from the key, the same on every machine.

Golden cases with wide layers name a seed and a gain and list their keys and shapes; this is the
generator they were made with (a multiplicative hash of the flat index, salted with the key's CRC-32).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.parity.cases import ParityCase, ParityOutput

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


def draw_weights(case: ParityCase, *, leave_out: Callable[[str], bool] = lambda key: False) -> dict[str, Tensor]:
    """The tensors of a case that only lists their keys and shapes."""
    seed, gain = case.config.get("recipe_seed", 0), case.config.get("recipe_gain", 1.0)
    return {
        key: torch.from_numpy(draw_recipe_weight(key, tuple(shape), seed=seed, gain=gain))
        for key, shape in case.config["state_dict_shapes"].items()
        if not leave_out(key)
    }


def find_weights(
    case: ParityCase, *, leave_out: Callable[[str], bool] = lambda key: False
) -> tuple[dict[str, Tensor], list[ParityOutput]]:
    """Stored weights, or computed ones with a comparison of every number that the file gives of them."""
    if case.config.get("weights") != "recipe":
        return dict(case.weights), []
    weights = draw_weights(case, leave_out=leave_out)
    stored = [ParityOutput(f"weights.{key}", weights[key], tensor, 0.0) for key, tensor in case.weights.items()]
    probes = [
        ParityOutput(f"recipe_probe.{key}", weights[key].flatten()[: len(values)], torch.tensor(values), 0.0)
        for key, values in case.config.get("recipe_probe", {}).items()
    ]
    return weights, stored + probes
