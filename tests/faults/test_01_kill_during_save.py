"""A save that is killed at any moment leaves a complete checkpoint or none, and the run goes on from the last one."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from frameloom.checkpoint.reader import list_steps, load_checkpoint, load_latest, step_folder
from frameloom.checkpoint.writer import apply_retention, clear_leftovers
from frameloom.core.errors import CheckpointError
from frameloom.core.random import numpy_stream
from tests.checkpoint.saving import save_checkpoint
from tests.faults.injection import VARIABLE
from tests.faults.kills import loads_as_made, make
from tests.faults.runs import digests, metrics, wait_for_records

SAVE, SAVE_IN_PLACE = "tests.faults.kills:save", "tests.faults.kills:save_in_place"


def measure(warm, folder: Path) -> tuple[int, float]:
    """File operations of one save, and how long a process takes for it."""
    out = folder / "count"
    warm.run("tests.faults.kills:count_save", str(folder / "counted"), 1, str(out))
    started = time.monotonic()
    warm.run(SAVE, str(folder / "timed"), 1)
    return int(out.read_text()), time.monotonic() - started


@pytest.mark.parametrize(
    ("every", "num_random"), [pytest.param(2, 20, id="some"), pytest.param(1, 200, id="many", marks=pytest.mark.stress)]
)
@pytest.mark.timeout(900)
def test_a_killed_save_is_complete_or_absent(warm, tally, tmp_path, every, num_random):
    num_operations, duration_s = measure(warm, tmp_path)
    assert num_operations > 8
    delays = numpy_stream(0, "kills").uniform(0, 1.2 * duration_s, num_random).tolist()
    kills = [(number, None) for number in range(1, num_operations + 1, every)] + [(0, delay) for delay in delays]
    root, num_cut = tmp_path / "checkpoints", 0
    for step in (0, 1):
        save_checkpoint(root, make(step))
    for number, delay_s in kills:
        step = list_steps(root)[-1] + 1
        child = warm.start(SAVE, str(root), step, number)
        if delay_s is not None:
            time.sleep(delay_s)
            child.kill()
        tally.inject()
        is_killed = warm.wait(child) != 0
        num_cut += is_killed and step not in list_steps(root)
        latest = load_latest(root)
        assert latest is not None and latest.step in (step - 1, step)
        assert all(loads_as_made(root, kept) for kept in list_steps(root)[-2:])
        clear_leftovers(root)
        save_checkpoint(root, make(step))
        assert loads_as_made(root, step)
        apply_retention(root, 2)
        assert {path.name for path in root.iterdir()} == {f"step-{kept:08d}" for kept in (step - 1, step)}
    assert num_cut >= len(kills) // 3, "the kills came too late to prove anything"


def test_without_the_rename_a_killed_save_would_be_offered(warm, tmp_path):
    """The control: written in place, some kills leave a step that is listed and cannot be loaded."""
    num_bad = 0
    for number in (2, 3, 4):
        root = tmp_path / f"in place {number}"
        warm.wait(warm.start(SAVE_IN_PLACE, str(root), 1, number))
        for step in list_steps(root):
            try:
                load_checkpoint(step_folder(root, step))
            except CheckpointError:
                num_bad += 1
    assert num_bad > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_again_and_again_equals_one_never_stopped(warm, tally, world):
    """SIGKILL of the real command, at moments that the run does not choose, also amid a save in the background."""
    path = world.write_recipe()
    longer = ("--train.steps", "100", "--train.save_every", "7")
    whole = warm.command("train", str(path), *longer, "--name", "whole")
    for number, records in enumerate((5, 33, 66)):
        more = ("--data.workers", str(number % 2), "--train.async_save", str(number != 1).lower())
        child = warm.command("train", str(path), *longer, "--name", "killed", *more)
        wait_for_records(world.folder / "killed", records)
        child.kill()
        tally.inject()
        assert warm.wait(child) < 0
    last = warm.command("train", str(path), *longer, "--name", "killed", "--train.async_save", "true")
    assert warm.wait(last, 300) == 0, last.output
    assert warm.wait(whole, 300) == 0, whole.output
    assert "resuming from step" in last.output
    assert digests(world.folder / "killed", 100) == digests(world.folder / "whole", 100)
    assert metrics(world.folder / "killed") == metrics(world.folder / "whole")


def test_a_run_killed_after_its_first_step_goes_on_however_slow_its_saves_are(warm, tally, world):
    path = world.write_recipe(train={"steps": 4, "save_every": 2, "log_every": 1, "async_save": True})
    slow = [{"point": "save", "step": 0, "act": "slow", "seconds": 1.5}]
    child = warm.command("train", str(path), env={VARIABLE: json.dumps(slow)})
    wait_for_records(world.folder / "run", 1)
    child.kill()
    tally.inject()
    warm.wait(child)
    again = warm.command("train", str(path))
    assert warm.wait(again) == 0, again.output
    assert "resuming from step" in again.output


def test_leftovers_of_a_killed_save_do_not_stay(tmp_path):
    save_checkpoint(tmp_path, make(1))
    shutil.copytree(step_folder(tmp_path, 1), tmp_path / ".partial-0-step-00000002")
    assert list_steps(tmp_path) == [1]
    clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
