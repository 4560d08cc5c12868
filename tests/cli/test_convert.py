"""`frameloom convert` as a person meets it: output, exit codes, messages, and the memory that it takes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from frameloom.checkpoint.model_folder import read_weights
from tests.faults.warm import run_frameloom


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_frameloom("convert", *arguments)


def test_a_conversion_prints_what_it_wrote(tmp_path):
    torch.save({"state_dict": {"module.a": torch.ones(3), "module.b": torch.arange(2)}, "step": 5}, tmp_path / "a.ckpt")
    done = run(tmp_path / "a.ckpt", tmp_path / "a.safetensors", "--dtype", "fp16")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "2 tensors (1 int64, 1 float16), 22 bytes" in first or "2 tensors (1 float16, 1 int64), 22 bytes" in first
    assert re.fullmatch(r"sha256 [0-9a-f]{64}  a.safetensors", second)
    assert "stripped 'module.' from 2 of 2 names" in done.stderr and "converting tensors: 2/2" in done.stderr
    assert set(load_file(tmp_path / "a.safetensors")) == {"a", "b"}


def test_a_mistake_gets_one_message_and_exit_code_2(tmp_path):
    torch.save({"ema": {"a": torch.ones(1)}, "model": {"a": torch.zeros(1)}}, tmp_path / "two.pt")
    done = run(tmp_path / "two.pt", tmp_path / "x")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "--section:\n  ema: 1 tensors, 4 bytes\n  model: 1 tensors, 4 bytes" in done.stderr
    assert not (tmp_path / "x").exists()


def test_help_shows_examples():
    done = run("--help")
    assert done.returncode == 0 and "frameloom convert vae/merged.ckpt" in done.stdout


MEASURE = """
import sys
from pathlib import Path
from frameloom.checkpoint.model_folder import read_weights
from frameloom.interop.convert.convert import Conversion, convert_weights

def peak():
    # The resource module would also count the process that started this one.
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) * 1024

source, out, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
before = peak()
if mode == "hold":
    held = dict(read_weights(source).tensors)
else:
    convert_weights(Conversion(source, out, shard_bytes=50_000_000))
print(peak() - before)
"""


def measure_growth(source: Path, out: Path, mode: str = "convert") -> int:
    """Bytes that the peak of a fresh process rises by while it converts."""
    command = [sys.executable, "-c", MEASURE, str(source), str(out), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_memory_stays_near_one_shard(tmp_path):
    """A file of 400 MB, shards of 50 MB: less than 150 MB, from a pickle and from safetensors, there and back."""
    tensors = {f"layer.{index}": torch.full((2_500_000,), float(index)) for index in range(40)}
    torch.save(tensors, tmp_path / "big.pt")
    del tensors
    limit = 150_000_000
    assert measure_growth(tmp_path / "big.pt", tmp_path / "shards") < limit
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) == 8
    assert measure_growth(tmp_path / "shards", tmp_path / "big.safetensors") < limit
    assert measure_growth(tmp_path / "big.safetensors", tmp_path, "hold") > 2 * limit, "the measure sees whole models"
    assert read_weights(tmp_path / "big.safetensors").tensors["layer.39"].eq(39).all()
