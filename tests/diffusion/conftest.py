"""Golden tensors by name, and the patch layout they are stored in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from torch import Tensor

GOLDENS = Path(__file__).parents[1] / "goldens"

Golden = tuple[dict[str, Tensor], dict[str, Any]]


def read_golden(system: str, case: str) -> Golden:
    """Tensors and configuration of a golden case."""
    with safe_open(GOLDENS / system / f"{case}.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["config"])  # noqa: SIM118


def unpack_patches(tokens_BND: Tensor, channels: int, frames: int, height: int, width: int) -> Tensor:
    """Tokens of 2x2 patches (channel outermost inside a token) as a latent."""
    patches = tokens_BND.reshape(-1, frames, height // 2, width // 2, channels, 2, 2)
    return patches.permute(0, 4, 1, 2, 5, 3, 6).reshape(-1, channels, frames, height, width)


@pytest.fixture
def golden() -> Callable[[str, str], Golden]:
    return read_golden


@pytest.fixture
def unpack() -> Callable[..., Tensor]:
    return unpack_patches


@pytest.fixture
def golden_json() -> Callable[[str, str], Any]:
    return lambda system, case: json.loads((GOLDENS / system / f"{case}.json").read_text())
