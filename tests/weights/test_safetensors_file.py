"""Safetensors in streaming form: equal to the library's bytes, and a clear answer to every kind of damage."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from frameloom.core.errors import CheckpointError
from frameloom.core.files import digest_file
from frameloom.weights.lazy_tensors import LazyTensors, cast_tensors, defer_tensors, rename_tensors
from frameloom.weights.safetensors_file import open_safetensors, write_safetensors


def all_kinds() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, generator=generator)
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)
    whole = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool)
    tensors = {str(dtype): values.to(dtype) for dtype in kinds}
    tensors |= {str(dtype): (values > 0).to(dtype) for dtype in whole}
    tensors |= {"single": torch.tensor(3.5), "single whole": torch.tensor(7), "empty": torch.empty(0, 4)}
    tensors |= {"turned": torch.randn(3, 4, generator=generator).t(), "ü.weight": torch.ones(2, 1, 3)}
    return tensors


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    return ours.contiguous().reshape(-1).view(torch.uint8).equal(theirs.contiguous().reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_is_byte_for_byte_that_of_the_library(tmp_path, metadata):
    tensors = all_kinds()
    digest = write_safetensors(tmp_path / "ours.safetensors", defer_tensors(tensors), metadata=metadata)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "theirs.safetensors", metadata)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert digest == digest_file(tmp_path / "theirs.safetensors")
    save_file(contiguous | {"single": torch.tensor(3.25)}, tmp_path / "other.safetensors", metadata)
    assert digest != digest_file(tmp_path / "other.safetensors")


def test_every_number_format_comes_back_bit_for_bit(tmp_path):
    tensors = all_kinds()
    write_safetensors(tmp_path / "a.safetensors", defer_tensors(tensors))
    lazy = open_safetensors(tmp_path / "a.safetensors")
    assert set(lazy) == set(tensors) and len(lazy) == len(tensors)
    assert all(same(lazy[name], tensors[name]) for name in tensors)
    assert not same(lazy["turned"], tensors["turned"] + 1)
    assert lazy.pending["turned"].shape == (4, 3) and lazy.pending["single whole"].dtype == torch.int64
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors)


def test_a_tensor_is_read_when_it_is_asked_for_and_not_before(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.ones(4)}, path)
    lazy = open_safetensors(path)
    save_file({"a": torch.full((4,), 2.0), "b": torch.ones(4)}, path)
    assert lazy["a"].tolist() == [2, 2, 2, 2]
    lazy["a"].add_(1)
    assert lazy["a"].tolist() == [2, 2, 2, 2]
    assert "a" in lazy and "c" not in lazy
    with pytest.raises(KeyError):
        lazy["c"]


def test_tied_names_are_written_as_notes_and_read_as_tensors(tmp_path):
    pending = defer_tensors({"shared": torch.arange(5)}).pending
    write_safetensors(tmp_path / "a.safetensors", LazyTensors(pending, tied={"head": "shared"}))
    assert set(load_file(tmp_path / "a.safetensors")) == {"shared"}
    lazy = open_safetensors(tmp_path / "a.safetensors")
    assert lazy.tied == {"head": "shared"} and lazy["head"].equal(torch.arange(5)) and lazy.metadata == {}
    assert lazy.num_bytes == 40 and lazy.untied().num_bytes == 80 and lazy.untied()["head"].equal(lazy["shared"])


def write_header(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, dtype: Any = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data", "found"),
    [
        (b"", b"", "not JSON"),
        (b"[1]", b"", "not a JSON object"),
        (b'{"a":' + b"[" * 100_000, b"", "not JSON"),
        ({"a": 3}, b"", "'a' has no place"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"", "'a' has no place"),
        ({"a": entry(0, 4)}, b"123", "take 4 bytes and the file has 3"),
        ({"a": entry(0, 4)}, b"12345", "take 4 bytes and the file has 5"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", "'b'.*begin at byte 4"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, b"0" * 12, "'b'.*begin at byte 4"),
        ({"a": entry(0, 8)}, b"12345678", "'a'"),
        ({"a": entry(0, 4, shape=(-1,))}, b"1234", r"shape \[-1\]"),
        ({"a": entry(0, 4, shape="1")}, b"1234", "shape '1'"),
        ({"a": entry(0, 4, dtype="F31")}, b"1234", "dtype 'F31'"),
        ({"a": entry(0, 4, dtype=["F32"])}, b"1234", "dtype"),
        ({"__metadata__": {"x": 3}, "a": entry(0, 4)}, b"1234", "table of texts"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', b"", "'a' twice"),
    ],
)
def test_a_wrong_header_is_refused_with_the_reason(tmp_path, header, data, found):
    path = write_header(tmp_path / "a.safetensors", header, data)
    with pytest.raises(CheckpointError, match=found) as caught:
        open_safetensors(path)
    assert str(path) in str(caught.value)


def test_a_right_header_of_the_same_making_is_read(tmp_path):
    path = write_header(tmp_path / "a.safetensors", {"b": entry(4, 8), "a": entry(0, 4)}, bytes(8))
    assert {name: tensor.tolist() for name, tensor in open_safetensors(path).items()} == {"a": [0.0], "b": [0.0]}


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
def test_a_truncated_file_is_refused(tmp_path, kept):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    os.truncate(path, kept if kept >= 0 else path.stat().st_size + kept)
    with pytest.raises(CheckpointError, match=r"not a complete safetensors file.*again"):
        open_safetensors(path)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error_not_a_crash(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(100_000)}, path)
    lazy = open_safetensors(path)
    os.truncate(path, 1000)
    with pytest.raises(CheckpointError, match="became shorter"):
        lazy["a"]


def test_casting_changes_floats_alone_and_refuses_what_does_not_fit():
    tensors = defer_tensors({"f": torch.tensor([1.1, torch.inf]), "i": torch.tensor([2**40]), "h": torch.tensor([7e4])})
    as_bf16 = cast_tensors(tensors, torch.bfloat16)
    assert as_bf16["f"].equal(tensors["f"].bfloat16()) and as_bf16.pending["f"].dtype == torch.bfloat16
    assert as_bf16["i"].equal(tensors["i"]) and not as_bf16["f"].float().equal(tensors["f"])
    as_fp16 = cast_tensors(tensors, torch.float16)
    assert as_fp16["f"].isinf().tolist() == [False, True]
    with pytest.raises(CheckpointError, match=r"h: 1 of its numbers are too large.*7e\+04.*bf16"):
        as_fp16["h"]


def test_renaming_refuses_two_tensors_with_one_name():
    tensors = LazyTensors(defer_tensors({"a.x": torch.zeros(1), "x": torch.ones(1)}).pending, tied={"a.y": "x"})
    renamed = rename_tensors(tensors, lambda name: name.replace(".", "/"), where="file")
    assert set(renamed) == {"a/x", "x", "a/y"} and renamed["a/y"].tolist() == [1]
    with pytest.raises(CheckpointError, match=r"file: 'x' would be renamed to 'x', as 'a.x' is"):
        rename_tensors(tensors, lambda name: name.removeprefix("a."), where="file")
