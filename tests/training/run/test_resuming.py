"""How a run goes on: with another recipe or split of a batch, elsewhere in the data, from weights alone; and who may
hold its folder. Resumes to the bit are rows 12 to 18 of tests/faults.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars
import pytest

from frameloom.checkpoint.model_folder import read_weights
from frameloom.checkpoint.reader import load_checkpoint, read_state, step_folder
from frameloom.core.errors import CheckpointError, ConfigError, RunError
from frameloom.training.run.changes import find_changes
from frameloom.training.run.folder import RunFolder
from frameloom.training.run.resuming import ResumeChoices, resolve_position
from frameloom.training.train import train
from tests.faults.runs import metrics


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines}


def position(run: Path, step: int) -> tuple[int, int]:
    state = read_state(step_folder(run / "checkpoints", step))
    return state["epoch"], state["position"]


def test_a_changed_recipe_is_listed_and_needs_a_word_where_it_changes_what_is_learnt(world, caplog):
    caplog.set_level(logging.INFO)
    train(world.recipe("--train.steps", "2"))
    changed = ("--train.steps", "3", "--optim.lr", "2e-3", "--seed", "7")
    with pytest.raises(RunError, match=r"changed since step 2") as refused:
        train(world.recipe(*changed))
    assert refused.value.exit_code == 2
    assert "  optim.lr: 0.001 -> 0.002\n  seed: 42 -> 7\n" in str(refused.value)
    assert (
        "train.steps" not in str(refused.value) and "changed since the last start: train.steps: 2 -> 3" in caplog.text
    )
    run = train(world.recipe(*changed), ResumeChoices(accept_recipe_change=True))
    assert set(losses(run)) == {1, 2, 3}
    caplog.clear()
    train(world.recipe(*changed))
    assert "changed since" not in caplog.text


def test_what_does_not_change_what_is_learnt_goes_on_without_a_word(world):
    before = world.recipe()
    harmless = world.recipe(
        *("--train.steps", "9", "--train.save_every", "3", "--train.keep", "4", "--data.workers", "1"),
        *("--name", "other"),
        *("--parallel.zero", "3", "--run.trackers", "[]", "--sample.guidance", "3", "--train.checkpoint", "whole"),
        validation={"every": 3, "where": {"split": "val"}},
    )
    found = find_changes(before, harmless)
    assert len(found) > 8 and all(change.is_harmless for change in found)
    for words in (
        ("--train.accumulate", "2"),
        ("--parallel.data", "2"),
        ("--optim.name", "lion"),
        ("--data.flip", "0.5"),
    ):
        assert any(not change.is_harmless for change in find_changes(before, world.recipe(*words)))
    assert find_changes(before, before) == []


def test_a_damaged_line_of_metrics_is_dropped_and_told(world, caplog):
    run = train(world.recipe("--train.steps", "2"))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\0\0\0\0\n\xff\xfe\n[1]\n" + b'{"step": 2, "train/lo')
    train(world.recipe("--train.steps", "4"))
    assert list(losses(run)) == [1, 2, 3, 4]
    assert "metrics.jsonl: 3 damaged lines are dropped" in caplog.text


def test_a_run_beyond_its_last_step_says_that_it_trains_nothing(world, caplog):
    run = train(world.recipe("--train.steps", "4"))
    train(world.recipe("--train.steps", "2"))
    assert f"{run}: is at step 4, beyond the 2 of this recipe; nothing is trained" in caplog.text
    assert list(losses(run)) == [1, 2, 3, 4]


@pytest.mark.parametrize("left", ["export/model.safetensors", "samples/step-00000002/contact-sheet.png"])
def test_a_folder_with_results_and_no_checkpoint_is_not_started_afresh(world, left):
    place = world.folder / "run" / left
    place.parent.mkdir(parents=True)
    place.write_bytes(b"of another start")
    with pytest.raises(CheckpointError, match="has trained before but holds no complete checkpoint"):
        train(world.recipe("--run.trackers", "[]"))
    assert place.read_bytes() == b"of another start"


def test_the_data_may_start_again_while_weights_and_step_go_on(world):
    recipe = ("--train.steps", "3", "--train.save_every", "1", "--train.keep", "9")
    plain, again = (train(world.recipe("--name", name, "--train.steps", "2")) for name in ("plain", "again"))
    assert position(plain, 2)[1] > 0
    train(world.recipe("--name", "plain", *recipe))
    train(world.recipe("--name", "again", *recipe), ResumeChoices(data_position=0))
    assert position(again, 3)[1] < position(plain, 3)[1]
    assert losses(again)[3] != losses(plain)[3] and losses(again)[2] == losses(plain)[2]


def test_other_data_is_refused_with_what_changed_and_goes_on_when_accepted(world, tmp_path):
    data = shutil.copytree(world.shared / "data", tmp_path / "data")
    words = ("--data.manifest", str(data / "manifest.parquet"))
    run = train(world.recipe(*words, "--train.steps", "2"))
    (run / "bad_clips.jsonl").write_text(
        '{"row": 3, "path": "a", "reason": "gone", "epoch": 0, "ordinal": 1, "fatal": true}\n'
    )
    table = polars.read_parquet(data / "manifest.parquet")
    table.with_columns(caption=polars.col("caption") + " today").write_parquet(data / "manifest.parquet")
    with pytest.raises(CheckpointError, match=r"manifest has changed since step 2.* edited \(.*: caption"):
        train(world.recipe(*words, "--train.steps", "3"))
    train(world.recipe(*words, "--train.steps", "3"), ResumeChoices(accept_data_change=True))
    assert set(losses(run)) == {1, 2, 3} and not (run / "bad_clips.jsonl").exists()
    assert (run / "bad_clips-until-step-00000002.jsonl").is_file(), "rows mean other clips now"
    train(world.recipe(*words, "--train.steps", "4"))


def test_a_position_is_moved_to_the_beginning_of_its_batch():
    plan = SimpleNamespace(starts=np.array([0, 4, 8, 11]), num_samples=11)
    feed = SimpleNamespace(plan=lambda epoch: plan)
    for asked, place in ((0, (2, 0)), (4, (2, 4)), (7, (2, 4)), (10, (2, 8))):
        assert resolve_position(feed, (2, 8), ResumeChoices(data_position=asked)) == place
    assert resolve_position(feed, (2, 6), ResumeChoices()) == (2, 6), "without a word nothing moves"
    assert resolve_position(feed, (2, 6), ResumeChoices(accept_data_change=True)) == (2, 4)
    assert resolve_position(feed, (2, 30), ResumeChoices(accept_data_change=True)) == (3, 0)
    with pytest.raises(ConfigError, match=r"--data-position: 11 is not in epoch 2.* choose 0 to 10"):
        resolve_position(feed, (2, 8), ResumeChoices(data_position=11))


def test_a_run_starts_from_the_weights_of_a_run_its_export_or_one_of_its_checkpoints(world, caplog):
    caplog.set_level(logging.INFO)
    run = train(world.recipe("--train.steps", "2", "--train.ema.warmup", "false"))
    step = step_folder(run / "checkpoints", 2)
    exported = read_weights(run).tensors
    for number, path in enumerate((run, run / "export", step)):
        found = read_weights(path)
        assert (found.kind, found.name) == ("denoiser", "opensora2")
        fresh = train(world.recipe("--name", f"from-{number}", "--train.steps", "1", "--model.weights", str(path)))
        first = load_checkpoint(step_folder(fresh / "checkpoints", 0))
        assert all(bool((first.tensors["model"][name] == exported[name]).all()) for name in exported)
        assert position(fresh, 0) == (0, 0)
    assert f"from the weights of {step}; optimizer, step and position in the data start fresh" in caplog.text
    (run / "export" / "config.json").unlink()
    assert read_weights(run).digest == read_weights(step).digest, "an unfinished run gives its newest checkpoint"
    raw = load_checkpoint(step).tensors["model"]
    assert any(not bool((raw[name] == exported[name]).all()) for name in exported), "the average is the last weights"


def test_a_checkpoint_of_an_autoencoder_is_no_autoencoder_yet(world):
    run = train(world.recipe("--train.steps", "1", task="autoencoder"))
    with pytest.raises(CheckpointError, match="scale of an autoencoder's latents"):
        read_weights(step_folder(run / "checkpoints", 1), kind="vae")


def test_a_folder_is_held_by_one_and_a_dead_one_s_lock_is_taken_over(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / "kept").write_text("")
    with folder.locked():
        name = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(RunError, match=f"in use by {name}"), folder.locked():
            pass
    assert "taken over" not in caplog.text
    with folder.locked():
        assert "taken over" not in caplog.text, "one that left in order leaves no name"
    (folder.path / "lock").write_text("process 999999 on elsewhere")
    with folder.locked():
        assert "the lock of process 999999 on elsewhere, which is gone, is taken over" in caplog.text
        assert (folder.path / "lock").read_text() == name


def test_choices_are_off_by_default():
    assert not any(dataclasses.astuple(ResumeChoices()))


def even_manifest(world) -> str:
    """A table whose clips fill whole batches of 4: an accumulation split then changes nothing but sums."""
    table = polars.read_parquet(world.shared / "data" / "manifest.parquet")
    wide = table.filter(kind="video", split="train").filter(polars.col("width") >= polars.col("height")).head(16)
    assert len(wide) == 16
    path = world.folder / "even.parquet"
    wide.write_parquet(path)
    return str(path)


def split_recipe(world, name: str, batch: int, accumulate: int, *overrides: str):
    return world.recipe(
        *("--name", name, "--data.manifest", even_manifest(world), "--data.root", str(world.shared / "data")),
        *("--data.buckets", f"{{64px: {{9: [1.0, {batch}]}}}}", "--train.accumulate", str(accumulate), *overrides),
    )


def losses_in_order(run: Path) -> list[float]:
    return [record["train/loss"] for record in metrics(run)]


def test_another_accumulation_split_uses_the_same_samples_and_noise(world):
    whole = train(split_recipe(world, "whole", 4, 1))
    halves = train(split_recipe(world, "halves", 2, 2))
    assert losses_in_order(halves) == pytest.approx(losses_in_order(whole), rel=1e-5)
    other = train(split_recipe(world, "other", 2, 2, "--seed", "7"))
    assert losses_in_order(other) != pytest.approx(losses_in_order(whole), rel=1e-5)


def test_a_resume_may_change_the_split_in_the_middle_of_an_epoch(world):
    """Two steps of 4, then steps of 2 + 2: the same samples follow."""
    whole = train(split_recipe(world, "whole", 4, 1))
    train(split_recipe(world, "changed", 4, 1, "--train.steps", "2"))
    changed = train(split_recipe(world, "changed", 2, 2), ResumeChoices(accept_recipe_change=True))
    assert losses_in_order(changed) == pytest.approx(losses_in_order(whole), rel=1e-5)


def test_resume_never_refuses_a_used_folder(world):
    train(world.recipe())
    with pytest.raises(RunError, match="holds a run already"):
        train(world.recipe("--run.resume", "never"))
