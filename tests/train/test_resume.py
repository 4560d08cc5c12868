"""A run that was stopped and resumed equals one that never stopped, to the bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars
import pytest
import torch

from frameloom.checkpoint.store import list_steps, load_checkpoint, read_state, step_folder
from frameloom.core.errors import CheckpointError, RunError
from frameloom.train.loop import train

TIMING = {"train/steps_per_s", "train/tokens_per_s"}


def metrics(run: Path) -> list[dict[str, float]]:
    """Everything that was logged, without the clock."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMING} for record in records]


def digests(run: Path, step: int) -> dict[str, str]:
    """What a step holds, as digests: weights, average, optimizer."""
    return dict(read_state(step_folder(run / "checkpoints", step))["files"])


def stop_after(run: Path, step: int, target: Path) -> None:
    """A copy of a run as a kill right after `step` was saved would have left it, with metrics a little ahead."""
    shutil.copytree(run, target)
    shutil.rmtree(target / "export")
    for later in list_steps(target / "checkpoints"):
        if later > step:
            shutil.rmtree(step_folder(target / "checkpoints", later))


@pytest.mark.parametrize("task", ["denoiser", "autoencoder"])
def test_resuming_at_any_step_gives_the_same_weights_and_metrics(world, task):
    """Faults 12 and 13: also over the end of an epoch, which has 9 micro-batches here."""
    recipe = world.recipe("--train.steps", "11", "--train.save_every", "1", "--train.keep", "20", task=task)
    run = train(recipe)
    for step in (0, 5, 9):
        again = world.folder / f"again-{step}"
        stop_after(run, step, again / "run")
        train(recipe.model_copy(update={"run": recipe.run.model_copy(update={"folder": str(again)})}))
        assert digests(again / "run", 11) == digests(run, 11)
        assert metrics(again / "run") == metrics(run)


def test_another_seed_differs(world):
    """The control of every equality here (fault 18)."""
    first = train(world.recipe("--name", "first"))
    second = train(world.recipe("--name", "second", "--seed", "43"))
    assert digests(first, 6)["model.safetensors"] != digests(second, 6)["model.safetensors"]
    assert metrics(first) != metrics(second)


def test_the_number_of_workers_changes_nothing(world):
    """Fault 14: with none, and with two, changed in the middle of the run."""
    alone = train(world.recipe("--name", "alone"))
    mixed = train(world.recipe("--name", "mixed", "--train.steps", "2", "--data.workers", "2"))
    assert list_steps(mixed / "checkpoints")[-1] == 2
    train(world.recipe("--name", "mixed", "--data.workers", "1"))
    assert digests(alone, 6) == digests(mixed, 6)


def test_stray_draws_from_the_global_generators_change_nothing(world):
    """Fault 17."""
    first = train(world.recipe("--name", "first"))
    torch.manual_seed(99)
    torch.rand(1000)
    second = train(world.recipe("--name", "second"))
    assert digests(first, 6) == digests(second, 6)


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


def losses(run: Path) -> list[float]:
    return [record["train/loss"] for record in metrics(run)]


def test_another_accumulation_split_uses_the_same_samples_and_noise(world):
    whole = train(split_recipe(world, "whole", 4, 1))
    halves = train(split_recipe(world, "halves", 2, 2))
    assert losses(halves) == pytest.approx(losses(whole), rel=1e-5)
    other = train(split_recipe(world, "other", 2, 2, "--seed", "7"))
    assert losses(other) != pytest.approx(losses(whole), rel=1e-5)


def test_a_resume_may_change_the_split_in_the_middle_of_an_epoch(world):
    """Two steps of 4, then steps of 2 + 2: the same samples follow."""
    whole = train(split_recipe(world, "whole", 4, 1))
    train(split_recipe(world, "changed", 4, 1, "--train.steps", "2"))
    changed = train(split_recipe(world, "changed", 2, 2))
    assert losses(changed) == pytest.approx(losses(whole), rel=1e-5)


def test_changed_data_is_refused(world, tmp_path):
    """Fault 26."""
    data = tmp_path / "data"
    shutil.copytree(world.shared / "data", data)
    manifest = ["--data.manifest", str(data / "manifest.parquet")]
    train(world.recipe(*manifest, "--train.steps", "2"))
    table = polars.read_parquet(data / "manifest.parquet")
    table.with_columns(caption=polars.col("caption") + " today").write_parquet(data / "manifest.parquet")
    with pytest.raises(CheckpointError, match="manifest has changed"):
        train(world.recipe(*manifest))


def test_a_used_folder_without_a_checkpoint_is_never_a_fresh_start(world):
    run = train(world.recipe())
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train(world.recipe())


def test_resume_never_refuses_a_used_folder(world):
    train(world.recipe())
    with pytest.raises(RunError, match="holds a run already"):
        train(world.recipe("--run.resume", "never"))


def start(recipe: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "frameloom", "train", str(recipe), *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ})


def wait_for_records(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").is_file() and len((run / "metrics.jsonl").read_text().splitlines()) >= count:
            return
        if process.poll() is not None:
            return
        time.sleep(0.002)
    raise AssertionError(f"no {count} records after 120 s: {process.communicate()[0]}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_again_and_again_equals_one_never_stopped(world):
    """Real SIGKILL of the real command, at moments that the run does not choose, also amid a save in the background."""
    longer = ("--train.steps", "150", "--train.save_every", "7")
    whole = train(world.recipe(*longer, "--name", "whole"))
    path = world.write_recipe()
    num_killed = 0
    for number, records in enumerate((5, 33, 80)):
        more = ("--data.workers", str(number % 2), "--train.async_save", str(number != 1).lower())
        with start(path, *longer, "--name", "killed", *more) as process:
            wait_for_records(world.folder / "killed", records, process)
            process.kill()
        num_killed += process.returncode == -signal.SIGKILL
    assert num_killed == 3
    last = start(path, *longer, "--name", "killed", "--train.async_save", "true")
    output = last.communicate(timeout=300)[0]
    assert last.returncode == 0, output
    assert "resuming from step" in output
    assert digests(world.folder / "killed", 150) == digests(whole, 150)
    assert metrics(world.folder / "killed") == metrics(whole)


@pytest.mark.slow
def test_sigterm_saves_and_a_second_process_is_refused(world):
    """Faults 10 and 16."""
    path = world.write_recipe()
    process = start(path, "--train.steps", "100000", "--train.save_every", "100000")
    wait_for_records(world.folder / "run", 3, process)
    second = start(path)
    output = second.communicate(timeout=120)[0]
    assert second.returncode == 2 and f"process {process.pid}" in output
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    saved = list_steps(world.folder / "run" / "checkpoints")[-1]
    assert saved >= 3 and f"saved step {saved}" in output
    assert load_checkpoint(step_folder(world.folder / "run" / "checkpoints", saved)).step == saved
