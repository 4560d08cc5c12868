import torch

from frameloom.checkpoint.reader import Checkpoint, list_steps, load_latest
from frameloom.checkpoint.writer import apply_retention
from frameloom.core.random import stream
from tests.checkpoint.saving import save_checkpoint


def make(step: int, size: int = 256) -> Checkpoint:
    draw = stream(0, "weights", step)
    tensors = {
        group: {"a": torch.randn(size, generator=draw), "b": torch.randn(3, 3, generator=draw)}
        for group in ("model", "ema")
    }
    return Checkpoint(step, tensors, {"epoch": 1, "position": step * 10})


def same(a: Checkpoint, b: Checkpoint) -> bool:
    return a.step == b.step and all(
        torch.equal(a.tensors[g][n], b.tensors[g][n]) for g in a.tensors for n in a.tensors[g]
    )


def test_what_is_saved_is_loaded(tmp_path):
    save_checkpoint(tmp_path, make(3))
    loaded = load_latest(tmp_path)
    assert loaded is not None and same(loaded, make(3)) and not same(loaded, make(4))
    assert loaded.state["position"] == 30


def test_retention_keeps_the_newest(tmp_path):
    for step in range(5):
        save_checkpoint(tmp_path, make(step))
        apply_retention(tmp_path, keep=2)
    assert list_steps(tmp_path) == [3, 4]
