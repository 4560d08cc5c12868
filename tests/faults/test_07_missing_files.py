"""A checkpoint with a missing, cut or empty file is called so by name; the one before is used, or none at all."""

from __future__ import annotations

import shutil

import pytest

from frameloom.checkpoint import reader
from frameloom.checkpoint.reader import find_latest, load_checkpoint, load_latest, step_folder
from frameloom.core.errors import CheckpointError
from frameloom.training.train import train
from tests.checkpoint.saving import save_checkpoint
from tests.faults.kills import is_same, make


def test_a_cut_or_missing_file_falls_back_to_the_step_before(tmp_path, tally):
    save_checkpoint(tmp_path, make(1, size=64))
    whole = save_checkpoint(tmp_path / "whole", make(2, size=64))
    for name in sorted(path.name for path in whole.iterdir()):
        content = (whole / name).read_bytes()
        for cut in (None, 0, *(len(content) * part // 20 for part in range(1, 20)), len(content) - 1):
            path = shutil.copytree(whole, step_folder(tmp_path, 2)) / name
            path.unlink() if cut is None else path.write_bytes(content[:cut])
            tally.inject()
            with pytest.raises(CheckpointError, match=name):
                load_checkpoint(path.parent)
            found = find_latest(tmp_path, set_aside=True)
            assert found is not None and is_same(found.load(), make(1, size=64))
            assert not path.parent.exists(), "its step could not be saved again"


def test_a_folder_of_damaged_ones_is_an_error_never_a_fresh_start(tmp_path, tally):
    assert load_latest(tmp_path) is None
    (save_checkpoint(tmp_path, make(1, size=64)) / "ema.safetensors").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        load_latest(tmp_path)
    tally.inject()


def test_a_used_run_without_a_checkpoint_is_never_started_afresh(world, warm, tally):
    run = train(world.recipe())
    losses = (run / "metrics.jsonl").read_bytes()
    for damage in ("emptied", "deleted"):
        if damage == "deleted":
            shutil.rmtree(run / "checkpoints")
        for folder in (run / "checkpoints").glob("step-*"):
            (folder / "model.safetensors").write_bytes(b"")
        child = warm.command("train", str(world.folder / "recipe.yaml"))
        assert warm.wait(child) == 2, child.output
        assert "checkpoint" in child.output and "move the" in child.output
        assert (run / "metrics.jsonl").read_bytes() == losses
        tally.inject()


def test_without_the_look_at_each_file_a_gap_would_be_met_in_the_middle(tmp_path, monkeypatch):
    """The control: with the state alone believed, the step with a gap is chosen instead of the whole one before it."""
    save_checkpoint(tmp_path, make(1, size=64))
    (save_checkpoint(tmp_path, make(2, size=64)) / "ema.safetensors").unlink()
    monkeypatch.setattr(reader, "verify_checkpoint", lambda folder, collective=None: reader.read_state(folder))
    with pytest.raises(Exception, match="ema"):
        load_latest(tmp_path)
