"""What is saved in the background is the moment of the save, whatever comes next; an error there is told soon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frameloom.checkpoint.reader import list_steps, load_checkpoint, step_folder
from frameloom.checkpoint.writer import Saver
from frameloom.core.errors import CheckpointError
from tests.faults.injection import VARIABLE
from tests.faults.kills import is_same, make
from tests.faults.runs import losses

COUNT = 50


def change_after_saving(saver: Saver, count: int) -> None:
    for step in range(count):
        checkpoint = make(step, size=20_000)
        saver.save(checkpoint)
        for tensors in checkpoint.tensors.values():
            for tensor in tensors.values():
                tensor.add_(1.0)  # the next step
    saver.wait()


def test_saved_is_the_moment_of_the_call_and_equals_a_save_that_is_waited_for(tmp_path, tally):
    for name, in_background in (("later", True), ("at once", False)):
        change_after_saving(Saver(tmp_path / name, keep=COUNT, in_background=in_background), COUNT)
    for step in range(COUNT):
        tally.inject()
        assert is_same(load_checkpoint(step_folder(tmp_path / "later", step)), make(step, size=20_000))
        files = [
            {path.name: path.read_bytes() for path in step_folder(tmp_path / name, step).iterdir()}
            for name in ("later", "at once")
        ]
        assert files[0] == files[1]


def test_without_the_copy_later_weights_would_be_saved(tmp_path, monkeypatch):
    """The control: the thread writes tensors that training changes in the meantime."""
    monkeypatch.setattr(Saver, "_copy", lambda self, tensors: tensors)
    count = 10
    change_after_saving(Saver(tmp_path, keep=count, in_background=True), count)
    assert any(is_wrong(step_folder(tmp_path, step), step) for step in range(count))


def is_wrong(folder: Path, step: int) -> bool:
    """Other weights, or weights that changed between their digest and their writing."""
    try:
        return not is_same(load_checkpoint(folder), make(step, size=20_000))
    except CheckpointError:
        return True


@pytest.mark.slow
def test_an_error_of_the_writer_ends_the_run_by_the_next_step(warm, tally, world):
    """The save of step 2 fails on purpose, and the next save, which would tell too, is thirty steps away."""
    path = world.write_recipe(train={"steps": 62, "save_every": 30, "log_every": 1, "async_save": True})
    fault = [{"point": "save", "step": 30, "act": "raise", "message": "the writer fails"}]
    child = warm.command("train", str(path), env={VARIABLE: json.dumps(fault)})
    tally.inject()
    assert warm.wait(child) != 0
    assert "the writer fails" in child.output
    run = world.folder / "run"
    assert list_steps(run / "checkpoints") == [0]
    last = max(losses(run))
    assert 30 <= last < 50, f"noticed only after step {last}"
    again = warm.command("train", str(path))
    assert warm.wait(again) == 0, again.output
