"""Every flipped byte of a checkpoint is noticed before a weight is used, and the step before is offered."""

from __future__ import annotations

import pytest
import torch
from safetensors import SafetensorError

from frameloom.checkpoint import reader
from frameloom.checkpoint.reader import load_checkpoint, load_latest
from frameloom.core.errors import CheckpointError
from frameloom.core.random import numpy_stream
from tests.checkpoint.saving import save_checkpoint
from tests.faults.kills import is_same, make

COUNT = 200


def flips(content: bytes, name: str, count: int) -> list[bytes]:
    draw = numpy_stream(0, f"flips of {name}")
    damaged = []
    for position in draw.integers(0, len(content), size=count):
        changed = bytearray(content)
        changed[position] ^= 1 << int(draw.integers(8))
        damaged.append(bytes(changed))
    return damaged


def test_every_flip_is_noticed_and_the_step_before_is_offered(tmp_path, tally):
    save_checkpoint(tmp_path, make(1, size=256))
    folder = save_checkpoint(tmp_path, make(2, size=256))
    files = sorted(folder.iterdir())
    assert len(files) >= 3
    for path in files:
        content = path.read_bytes()
        for number, damaged in enumerate(flips(content, path.name, COUNT // len(files) + 1)):
            path.write_bytes(damaged)
            tally.inject()
            with pytest.raises(CheckpointError, match=path.name):
                load_checkpoint(folder)
            if number % 20 == 0:
                before = load_latest(tmp_path)
                assert before is not None and is_same(before, make(1, size=256))
        path.write_bytes(content)
    assert is_same(load_checkpoint(folder), make(2, size=256))


def test_without_the_digests_flips_would_be_loaded_as_weights(tmp_path, monkeypatch):
    """The control: safetensors itself has no checksum, so nearly every flip in the numbers loads in silence."""
    folder, right = save_checkpoint(tmp_path, make(1, size=256)), make(1, size=256).tensors["model"]
    monkeypatch.setattr(reader, "is_undamaged", lambda path, digest: True)
    path, num_silent = folder / "model.safetensors", 0
    for damaged in flips(path.read_bytes(), path.name, 40):
        path.write_bytes(damaged)
        try:
            loaded = load_checkpoint(folder).tensors["model"]
        except SafetensorError:
            continue  # the header was hit
        num_silent += any(not torch.equal(loaded[name], right[name]) for name in right if name in loaded)
    assert num_silent > 20
