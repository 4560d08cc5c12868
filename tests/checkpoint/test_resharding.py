"""Tensors of a checkpoint folder, whoever wrote it: whole, a box of them, and every format."""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from xxhash import xxh3_128_hexdigest

from frameloom.checkpoint.reader import Checkpoint, load_checkpoint, read_state, step_folder
from frameloom.checkpoint.resharding import StoredTensors, list_groups
from frameloom.core.errors import CheckpointError
from frameloom.core.random import stream
from tests.checkpoint.saving import save_checkpoint

WEIGHT = torch.randn(7, 6, generator=stream(0, "weight"))
BIAS = torch.randn(5, generator=stream(0, "bias"))


def write_by_hand(folder: Path, files: dict[str, dict[str, torch.Tensor]], *, format: int, **state: Any) -> Path:
    """A checkpoint without the code that writes them."""
    folder.mkdir(parents=True)
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    digests = {name: digest((folder / name).read_bytes(), format) for name in files}
    content = {"step": 4, "files": digests, "format": format, **state}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    sealed = {**content, "seal": hashlib.sha256(text.encode()).hexdigest()}
    (folder / "state.json").write_text(json.dumps(sealed, indent=1, sort_keys=True) + "\n")
    return folder


def digest(data: bytes, format: int) -> str:
    return f"xxh3:{xxh3_128_hexdigest(data)}" if format > 2 else hashlib.sha256(data).hexdigest()


def write_pieces(folder: Path) -> Path:
    """A weight in four boxes, a bias whole in one of three files."""
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    pieces = {
        names[0]: {"weight": WEIGHT[:4].contiguous()},
        names[1]: {"weight": WEIGHT[4:, :2].contiguous(), "bias": BIAS},
        names[2]: {"weight": WEIGHT[4:, 2:].contiguous()},
    }
    parts = [[1, [0, 0], [4, 6]], [2, [4, 0], [3, 2]], [3, [4, 2], [3, 4]]]
    placement = {"weight": {"shape": [7, 6], "parts": parts}, "bias": {"shape": [5], "parts": [[2, [0], [5]]]}}
    more = {"ema.safetensors": {"weight": WEIGHT + 1}}
    return write_by_hand(folder, pieces | more, format=2, placement={"model": placement})


def test_any_box_is_put_together_from_the_pieces_that_it_lies_in(tmp_path: Path) -> None:
    folder = write_pieces(tmp_path / "step")
    with StoredTensors(folder, read_state(folder)) as stored:
        assert stored.shapes() == {"ema": {"weight": (7, 6)}, "model": {"weight": (7, 6), "bias": (5,)}}
        for row, column, height, width in product((0, 3, 4, 6), (0, 1, 2, 5), (0, 1, 3), (1, 4)):
            height, width = min(height, 7 - row), min(width, 6 - column)
            for group, whole in (("model", WEIGHT), ("ema", WEIGHT + 1)):
                found = stored.read(group, "weight", ((row, column), (height, width)))
                assert torch.equal(found, whole[row : row + height, column : column + width])
        assert not torch.equal(stored.read("model", "weight"), stored.read("ema", "weight"))


def test_pieces_are_read_whole_and_one_by_one(tmp_path: Path) -> None:
    folder = write_pieces(tmp_path / "step")
    loaded = load_checkpoint(folder).tensors
    assert torch.equal(loaded["model"]["weight"], WEIGHT) and torch.equal(loaded["model"]["bias"], BIAS)
    state = read_state(folder)
    lazy = StoredTensors(folder, state).defer("model")
    assert lazy.pending["weight"].shape == (7, 6) and torch.equal(lazy["weight"], WEIGHT)
    assert list_groups(state) == {"model", "ema"}


def test_pieces_that_do_not_make_up_the_whole_are_refused(tmp_path: Path) -> None:
    folder = write_pieces(tmp_path / "step")
    state = read_state(folder)
    state["placement"]["model"]["weight"]["parts"].pop(1)
    with StoredTensors(folder, state) as stored, pytest.raises(CheckpointError, match="do not make up the whole"):
        stored.read("model", "weight")


@pytest.mark.parametrize("format", [1, 3])
def test_a_format_of_one_file_loads_and_its_damage_is_seen(tmp_path: Path, format: int) -> None:
    folder = write_by_hand(tmp_path / "step", {"model.safetensors": {"weight": WEIGHT}}, format=format, position=40)
    loaded = load_checkpoint(folder)
    assert torch.equal(loaded.tensors["model"]["weight"], WEIGHT) and loaded.state["position"] == 40
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged, its content does not match the digest"):
        load_checkpoint(folder)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    unknown = write_by_hand(tmp_path / "unknown", {"model.safetensors": {"weight": WEIGHT}}, format=4)
    with pytest.raises(CheckpointError, match="format 4, this version reads formats 1 to 3"):
        load_checkpoint(unknown)


def test_what_one_process_writes_has_the_newest_format_byte_for_byte(tmp_path: Path) -> None:
    tensors = {"model": {"weight": WEIGHT, "bias": BIAS.to(torch.bfloat16), "step": torch.tensor(3)}, "ema": {}}
    save_checkpoint(tmp_path, Checkpoint(4, tensors, {"position": 40}))
    files = {f"{group}.safetensors": named for group, named in tensors.items()}
    by_hand = write_by_hand(tmp_path / "by hand", files, format=3, position=40)
    for name in (*files, "state.json"):
        assert (step_folder(tmp_path, 4) / name).read_bytes() == (by_hand / name).read_bytes()
