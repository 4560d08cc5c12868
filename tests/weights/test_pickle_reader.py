"""PyTorch's files for conversion: no code runs, sections are chosen, tied tensors stay tied, damage is told."""

from __future__ import annotations

import argparse
import io
import os
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from frameloom.core.errors import CheckpointError
from frameloom.weights.pickle_reader import open_pickle

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def save(content: object, path: Path, **options: object) -> Path:
    torch.save(content, path, **options)
    return path


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("place", ["value", "key", "inside"])
def test_code_in_a_file_is_refused_and_does_not_run(tmp_path, is_zip, place):
    payload = Payload(tmp_path / "was run")
    content = {
        "value": {**WEIGHTS, "x": payload},
        "key": {payload: WEIGHTS},
        "inside": {"state_dict": WEIGHTS, "optimizer": {"state": [payload]}},
    }[place]
    path = save(content, tmp_path / "evil.ckpt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"refused.*mkdir.*can run any code"):
        open_pickle(path)
    assert not (tmp_path / "was run").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "was run").exists(), "the file would have run code"


def test_harmless_objects_that_are_no_tensors_are_refused_by_name(tmp_path):
    path = save({"state_dict": WEIGHTS, "args": argparse.Namespace(lr=1)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"needs the object argparse.Namespace.*save the state dict alone"):
        open_pickle(path)


def test_tensors_come_back_bit_for_bit(tmp_path):
    content = {
        "bf16": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "fp16": torch.tensor([1.5, torch.nan], dtype=torch.float16),
        "int": torch.tensor([2**62, -1]),
        "single": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6).reshape(2, 3).t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    for is_zip in (True, False):
        lazy = open_pickle(save(content, tmp_path / f"{is_zip}.bin", _use_new_zipfile_serialization=is_zip))
        assert list(lazy) == list(content)
        for name, tensor in content.items():
            found = lazy[name]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape) and found.is_contiguous()
            assert torch.equal(found.nan_to_num(7), tensor.nan_to_num(7))
            assert torch.equal(lazy[name].nan_to_num(7), found.nan_to_num(7)), "reading twice gives the same"


def test_a_large_tensor_can_be_read_again_after_its_pages_were_dropped(tmp_path):
    tensors = {str(index): torch.full((300_000,), float(index)) for index in range(3)}
    lazy = open_pickle(save(tensors, tmp_path / "a.pt"))
    for _ in range(2):
        assert all(lazy[name].equal(tensors[name]) for name in tensors)


def test_tied_tensors_are_kept_under_their_first_name(tmp_path):
    shared = torch.randn(4, 3)
    content = OrderedDict(shared=shared, encoder=shared, part=shared[:2], other=shared.clone(), turned=shared.t())
    lazy = open_pickle(save(content, tmp_path / "a.bin"))
    assert lazy.tied == {"encoder": "shared"} and set(lazy) == set(content)
    assert all(lazy[name].equal(tensor) for name, tensor in content.items())


TRAINER = {
    "epoch": 3,
    "optimizer_state": {"gen_optimizer": {"state": {"exp_avg": torch.ones(2)}}},
    "state_dict": {"gen_model": WEIGHTS, "dics_model": {"main.weight": torch.ones(1)}},
    "ema_state_dict": {f"module.{name}": tensor + 1 for name, tensor in WEIGHTS.items()},
    "scaler_state": {"scale": torch.ones(1)},
}


def test_several_sections_are_listed_and_one_is_taken_by_name(tmp_path):
    path = save(TRAINER, tmp_path / "checkpoint.ckpt")
    with pytest.raises(CheckpointError) as caught:
        open_pickle(path)
    listed = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert listed == ["state_dict.gen_model", "state_dict.dics_model", "ema_state_dict"]
    assert "--section" in str(caught.value) and "2 tensors, 32 bytes" in str(caught.value)
    assert open_pickle(path, section="state_dict.gen_model")["a.bias"].equal(WEIGHTS["a.bias"])
    assert open_pickle(path, section="ema_state_dict")["module.a.bias"].equal(WEIGHTS["a.bias"] + 1)
    with pytest.raises(CheckpointError, match="no section 'ema'"):
        open_pickle(path, section="ema")


def test_a_family_s_order_of_sections_decides_and_empty_ones_do_not_count(tmp_path):
    prefer = ("ema_state_dict", "state_dict.gen_model", "state_dict")
    path = save(TRAINER, tmp_path / "a.ckpt")
    assert "module.a.bias" in open_pickle(path, prefer=prefer)
    assert "main.weight" in open_pickle(path, prefer=prefer, section="state_dict.dics_model")
    path = save({**TRAINER, "ema_state_dict": {}}, tmp_path / "b.ckpt")
    assert set(open_pickle(path, prefer=prefer)) == set(WEIGHTS)


@pytest.mark.parametrize("name", ["state_dict", "model", "module", "ema", "ema_state_dict"])
def test_the_only_section_is_taken_without_asking(tmp_path, name):
    path = save({name: WEIGHTS, "step": 7, "optimizer": {"m": torch.ones(9)}}, tmp_path / "a.pt")
    assert set(open_pickle(path)) == set(WEIGHTS)


@pytest.mark.parametrize("content", [{}, {"step": 3}, [torch.ones(2)], torch.ones(2), {"state": {0: torch.ones(1)}}])
def test_a_file_without_a_table_of_tensors_is_refused(tmp_path, content):
    with pytest.raises(CheckpointError, match="holds no table of tensors"):
        open_pickle(save(content, tmp_path / "a.pt"))


def test_wrong_and_damaged_files_are_told_apart(tmp_path):
    path = tmp_path / "a.pt"
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_pickle(path)
    for data in (b"", b"\x08\x01MindSpore", b"GIF89a"):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"not a file of torch.save"):
            open_pickle(path)
    data = save(WEIGHTS, path).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        open_pickle(path)
    legacy = save(WEIGHTS, path, _use_new_zipfile_serialization=False).read_bytes()
    path.write_bytes(legacy[:-40])
    with pytest.raises(CheckpointError, match=r"a.pt: "):
        open_pickle(path)


def test_archives_that_are_no_plain_weights_are_refused(tmp_path):
    path = save(WEIGHTS, tmp_path / "a.pt")
    with zipfile.ZipFile(path) as archive:
        entries = {one.filename: archive.read(one) for one in archive.infolist()}

    def expect(found: str, changed: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", compression) as archive:
            for name, data in changed.items():
                archive.writestr(name, data)
        path.write_bytes(buffer.getvalue())
        with pytest.raises(CheckpointError, match=found):
            open_pickle(path)

    expect("compressed", entries, zipfile.ZIP_DEFLATED)
    expect("TorchScript", {**entries, "a/constants.pkl": b"x"})
    expect("big-endian", {**entries, "a/byteorder": b"big"})
    expect("a.pt: ", {name: data for name, data in entries.items() if name != "a/data.pkl"})


def test_a_tensor_that_claims_more_than_the_file_is_refused(tmp_path):
    path = save({"a": torch.zeros(1).expand(10**9)}, tmp_path / "a.pt")
    assert path.stat().st_size < 10_000
    with pytest.raises(CheckpointError, match="'a' repeats few numbers to 4,000,000,000 bytes"):
        open_pickle(path)


def test_tensors_of_other_kinds_are_refused_by_name(tmp_path):
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (4,), check_invariants=True)
    with pytest.raises(CheckpointError, match="'s' is no plain tensor"):
        open_pickle(save({**WEIGHTS, "s": sparse}, tmp_path / "a.pt"))
    with pytest.raises(CheckpointError, match="without its numbers"):
        open_pickle(save({"m": torch.ones(3, device="meta")}, tmp_path / "b.pt"))
