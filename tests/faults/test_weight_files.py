"""Weight files of strangers: code in them is never run, and hostile headers are refused quickly."""

from __future__ import annotations

import json
import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from frameloom.checkpoint.model_folder import read_weights
from frameloom.checkpoint.reader import load_latest
from frameloom.core.errors import CheckpointError, FrameloomError
from frameloom.core.random import numpy_stream
from frameloom.data.cache.external import read_arrays
from frameloom.weights.safetensors_file import open_safetensors
from tests.checkpoint.saving import save_checkpoint
from tests.faults.kills import make

# Row 30: A weight file that holds code is never run: it is refused with the command that converts what is harmless in
# it.


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
def test_30_no_file_runs_code(tmp_path, tally, what):
    name, write, read = FILES[what]
    mark = tmp_path / "canary"
    path = write(tmp_path / name, Canary(mark))
    tally.inject()
    with pytest.raises(FrameloomError) as caught:
        read(path)
    assert caught.value.exit_code == 2 and not mark.exists()
    assert name in str(caught.value)


def test_30_the_command_gives_the_conversion(warm, world, tally):
    path = write_torch(world.folder / "model.pt", Canary(world.folder / "canary"))
    tally.inject()
    child = warm.expect(warm.command("train", str(world.write_recipe()), "--model.weights", str(path)), 2)
    assert "frameloom convert" in child and not (world.folder / "canary").exists()


def test_30_opened_as_others_do_the_files_would_run(tmp_path):
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


# Row 31: Hostile headers of safetensors files are refused, and a thousand damaged ones break nothing and cost little.
# Each form of a wrong header has its message in tests/weights/test_safetensors_file.py.

COUNT = 1000


def entry(start: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def pack(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


ATTACKS = {
    "length of the header beyond the file": pack(b"{}", length=2**40),
    "length of the header negative as a signed number": pack(b"{}", length=2**64 - 1),
    "deep nesting": pack(b'{"a":' + b"[" * 200_000),
    "a tensor of 2**60 numbers": pack(json.dumps({"a": entry(0, 4, shape=(2**30, 2**30))}).encode(), bytes(4)),
    "shape that overflows 64 bits": pack(json.dumps({"a": entry(0, 4, shape=(2**33, 2**33))}).encode(), bytes(4)),
    "places that overlap": pack(json.dumps({"a": entry(0, 4), "b": entry(2, 6)}).encode(), bytes(6)),
    "a place behind the end": pack(json.dumps({"a": entry(0, 400)}).encode(), bytes(4)),
    "a place that ends before it begins": pack(json.dumps({"a": entry(4, 0)}).encode(), bytes(4)),
    "a hole": pack(json.dumps({"a": entry(0, 4), "b": entry(8, 12)}).encode(), bytes(12)),
    "a name twice": pack(
        b'{"a":' + json.dumps(entry(0, 4)).encode() + b',"a":' + json.dumps(entry(0, 4)).encode() + b"}", bytes(4)
    ),
    "a large header of blanks": pack(b"{" + b" " * 120_000_000, length=120_000_001),
}


def read(path: Path) -> str:
    try:
        for tensor in open_safetensors(path).values():
            assert tensor.numel() >= 0
    except CheckpointError as error:
        assert str(path) in str(error)
        return "refused"
    return "read"


def measure(path: Path) -> tuple[str, float, float]:
    """What became of it, the seconds it took, and by how many megabytes the process has grown."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    fate = read(path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return fate, time.process_time() - started, grown / 1024


def attack(folder: str) -> None:
    """In a process of its own, whose memory tells."""
    for number, (what, content) in enumerate(ATTACKS.items()):
        path = Path(folder) / f"{number}.safetensors"
        path.write_bytes(content)
        del content
        fate, seconds, grown_mb = measure(path)
        assert fate == "refused" and seconds < 1 and grown_mb < 100, (what, fate, seconds, grown_mb)
        path.unlink()


def mutate(content: bytes, number: int) -> bytes:
    """Up to three changes: bytes overwritten, cut out or put in, mostly in the header; or the file's end gone."""
    draw = numpy_stream(number, "mutations")
    changed = bytearray(content)
    for _ in range(int(draw.integers(1, 4))):
        place = int(draw.integers(min(len(changed), 240)))
        kind = int(draw.integers(4))
        if kind == 0:
            changed[place] = int(draw.integers(256))
        elif kind == 1:
            del changed[place : place + int(draw.integers(1, 9))]
        elif kind == 2:
            changed[place:place] = bytes(draw.integers(0, 256, int(draw.integers(1, 9)), dtype="uint8"))
        else:
            del changed[len(changed) - int(draw.integers(len(changed))) :]
        if not changed:
            break
    return bytes(changed)


def mutate_many(folder: str, count: int) -> None:
    path = Path(folder) / "a.safetensors"
    save_file({"a": torch.arange(40.0), "b": torch.ones(2, 2, dtype=torch.int64)}, path, {"format": "pt"})
    content = path.read_bytes()
    fates = {"read": 0, "refused": 0}
    for number in range(count):
        path.write_bytes(mutate(content, number))
        fate, seconds, grown_mb = measure(path)
        assert seconds < 1 and grown_mb < 100, number
        fates[fate] += 1
    assert fates["refused"] > 0.8 * count, fates


def test_31_attacks_are_refused_quickly_and_in_little_memory(warm, tally, tmp_path):
    tally.inject(len(ATTACKS))
    warm.run("tests.faults.test_weight_files:attack", str(tmp_path))


def test_31_a_thousand_damaged_files_break_nothing(warm, tally, tmp_path):
    tally.inject(COUNT)
    warm.run("tests.faults.test_weight_files:mutate_many", str(tmp_path), COUNT)


def believe(folder: str) -> None:
    """The control: numbers of a header that are believed ask for memory that no file of this size can fill."""
    path = Path(folder) / "a.safetensors"
    path.write_bytes(ATTACKS["a tensor of 2**60 numbers"])
    header = json.loads(path.read_bytes()[8:-4])
    try:
        torch.empty(header["a"]["shape"])
    except RuntimeError:
        raise SystemExit(3) from None


def test_31_a_reader_that_believes_the_header_would_fail(warm, tmp_path):
    assert warm.wait(warm.start("tests.faults.test_weight_files:believe", str(tmp_path))) == 3
