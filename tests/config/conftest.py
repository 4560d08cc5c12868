from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

RECIPE = """\
# A denoiser for tests
name: tiny
task: denoiser
vae: {weights: vae.safetensors}
data:
  manifest: clips.parquet
  where: {split: train}
  buckets:
    64px: {1: [1.0, 8], 9: [[0.5, 0.75], 4]}
optim:
  lr: 1e-4
train:
  steps: 100
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(RECIPE)
    return file


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file below the test's folder and give its path."""

    def write_file(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write_file
