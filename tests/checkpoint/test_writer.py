from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from frameloom.checkpoint import writer
from frameloom.checkpoint.reader import Checkpoint, list_steps, load_checkpoint, load_latest, step_folder
from frameloom.checkpoint.writer import Saver
from frameloom.core.errors import CheckpointError
from frameloom.core.random import stream
from tests.faults.injection import VARIABLE


def make_checkpoint(step: int) -> Checkpoint:
    weights = torch.randn(1000, generator=stream(step, "weights"))
    return Checkpoint(step, {"model": {"weight": weights, "bias": weights[:7].to(torch.bfloat16)}}, {"epoch": step})


@pytest.mark.parametrize("in_background", [True, False])
def test_saved_is_the_moment_of_the_call_whatever_training_does_next(tmp_path: Path, in_background: bool) -> None:
    saver = Saver(tmp_path, keep=3, in_background=in_background)
    for step in (1, 2):
        checkpoint = make_checkpoint(step)
        saver.save(checkpoint)
        checkpoint.tensors["model"]["weight"].add_(1.0)  # the next step
    saver.wait()
    for step in (1, 2):
        found, wanted = load_checkpoint(step_folder(tmp_path, step)).tensors["model"], make_checkpoint(step)
        assert all(torch.equal(found[name], value) for name, value in wanted.tensors["model"].items())
        assert not torch.equal(found["weight"], wanted.tensors["model"]["weight"] + 1.0)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=2, in_background=True)
    for step in range(5):
        saver.save(make_checkpoint(step))
    saver.wait()
    assert list_steps(tmp_path) == [3, 4]


def test_an_error_of_the_thread_is_told_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []
    saver = Saver(tmp_path, keep=2, in_background=True, on_error=lambda: noted.append(1))
    saver.save(make_checkpoint(1))
    saver.wait()
    monkeypatch.setenv(VARIABLE, json.dumps([{"point": "save", "step": 2, "message": "the writer fails"}]))
    saver.save(make_checkpoint(2))
    with pytest.raises(RuntimeError, match="the writer fails"):
        saver.wait()
    assert noted == [1] and [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    saver.wait()  # told once
    saver.save(make_checkpoint(3))
    saver.wait()
    found = load_latest(tmp_path)
    assert found is not None and found.step == 3


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    saver = Saver(tmp_path / "runs", keep=2, in_background=True)
    with pytest.raises(CheckpointError, match=r"could not be saved .* needs 4,014 bytes and [\d,]+ are free"):
        saver.save(make_checkpoint(2))
    saver.wait()
    assert (tmp_path / "runs").is_file()


def test_memory_of_the_copies_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    empty = torch.empty

    def count(*args: object, **options: object) -> torch.Tensor:
        made.append(tuple(args[0]))  # type: ignore[arg-type, call-overload]
        return empty(*args, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(writer.torch, "empty", count)
    saver = Saver(tmp_path, keep=2, in_background=True)
    for step in range(3):
        saver.save(make_checkpoint(step))
    saver.wait()
    assert sorted(made) == [(7,), (1000,)]
