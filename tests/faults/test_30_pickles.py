"""A weight file that holds code is never run: it is refused with the command that converts what is harmless in it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frameloom.checkpoint.model_folder import read_weights
from frameloom.checkpoint.reader import load_latest
from frameloom.core.errors import FrameloomError
from frameloom.data.cache.external import read_arrays
from tests.checkpoint.saving import save_checkpoint
from tests.faults.kills import make


class Canary:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "ran")


def write_torch(path: Path, canary: Canary, **options: object) -> Path:
    torch.save({"weight": torch.zeros(2), "more": canary}, path, **options)
    return path


def write_dcp(path: Path, canary: Canary) -> Path:
    """A folder as torch.distributed.checkpoint leaves it; its metadata is a pickle."""
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": canary}))
    (path / "__0_0.distcp").write_bytes(pickle.dumps(canary))
    return path


def write_plain(path: Path, canary: Canary) -> Path:
    path.write_bytes(pickle.dumps(canary))
    return path


def write_objects(path: Path, canary: Canary) -> Path:
    np.save(path, np.array([canary], dtype=object), allow_pickle=True)
    return path


def write_optimizer(path: Path, canary: Canary) -> Path:
    """A checkpoint of ours whose optimizer file was replaced."""
    folder = save_checkpoint(path, make(1, size=8))
    (folder / "ema.safetensors").write_bytes(pickle.dumps(canary))
    return path


FILES: dict[str, tuple[str, Callable[..., Path], Callable[[Path], object]]] = {
    "zip .pt": ("model.pt", write_torch, read_weights),
    "legacy .ckpt": (
        "model.ckpt",
        lambda path, canary: write_torch(path, canary, _use_new_zipfile_serialization=False),
        read_weights,
    ),
    ".bin": ("pytorch_model.bin", write_torch, read_weights),
    "tar": ("model.tar", write_plain, read_weights),
    "distributed .metadata": ("dcp", write_dcp, read_weights),
    "numpy objects": ("text.npy", write_objects, read_arrays),
    "file of a checkpoint": ("checkpoints", write_optimizer, load_latest),
    "renamed .safetensors": ("model.safetensors", write_plain, read_weights),
}


@pytest.mark.parametrize("what", FILES)
def test_no_file_runs_code(tmp_path, tally, what):
    name, write, read = FILES[what]
    mark = tmp_path / "canary"
    path = write(tmp_path / name, Canary(mark))
    tally.inject()
    with pytest.raises(FrameloomError) as caught:
        read(path)
    assert caught.value.exit_code == 2 and not mark.exists()
    assert name in str(caught.value)


def test_the_command_gives_the_conversion(warm, world, tally):
    path = write_torch(world.folder / "model.pt", Canary(world.folder / "canary"))
    tally.inject()
    child = warm.command("train", str(world.write_recipe()), "--model.weights", str(path))
    assert warm.wait(child) == 2, child.output
    assert "frameloom convert" in child.output and not (world.folder / "canary").exists()


def test_opened_as_others_do_the_files_would_run(tmp_path):
    """The control."""
    opened: dict[str, Callable[[Path], object]] = {
        "zip .pt": lambda path: torch.load(path, weights_only=False),
        "legacy .ckpt": lambda path: torch.load(path, weights_only=False),
        "renamed .safetensors": lambda path: pickle.loads(path.read_bytes()),
        "numpy objects": lambda path: np.load(path, allow_pickle=True),
    }
    for number, (what, load) in enumerate(opened.items()):
        name, write, _ = FILES[what]
        mark, folder = tmp_path / f"canary-{number}", tmp_path / str(number)
        folder.mkdir()
        load(write(folder / name, Canary(mark)))
        assert mark.exists(), what
