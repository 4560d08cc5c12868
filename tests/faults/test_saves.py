"""Saves, repeated saves and deletions that are killed at any moment, and saves in the background."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from frameloom.checkpoint.reader import list_steps, load_checkpoint, load_latest, step_folder
from frameloom.checkpoint.writer import Saver, apply_retention, clear_leftovers
from frameloom.core.errors import CheckpointError
from frameloom.core.random import numpy_stream
from tests.checkpoint.saving import save_checkpoint
from tests.faults.injection import faults
from tests.faults.kills import is_same, loads_as_made, make
from tests.faults.runs import digests, losses, metrics, wait_for_records

# Row 1: A save that is killed at any moment leaves a complete checkpoint or none, and the run goes on from the last
# one.

ACT = "tests.faults.kills:act"


def measure(warm, folder: Path) -> tuple[int, float]:
    """File operations of one save, and how long a process takes for it."""
    num_operations = int(warm.run(ACT, "save", str(folder / "counted"), 0, 1))
    started = time.monotonic()
    warm.run(ACT, "save", str(folder / "timed"), 0, 1)
    return num_operations, time.monotonic() - started


@pytest.mark.parametrize(
    ("every", "num_random"), [pytest.param(2, 20, id="some"), pytest.param(1, 200, id="many", marks=pytest.mark.stress)]
)
@pytest.mark.timeout(900)
def test_01_a_killed_save_is_complete_or_absent(warm, tally, tmp_path, every, num_random):
    num_operations, duration_s = measure(warm, tmp_path)
    assert num_operations > 8
    delays = numpy_stream(0, "kills").uniform(0, 1.2 * duration_s, num_random).tolist()
    kills = [(number, None) for number in range(1, num_operations + 1, every)] + [(0, delay) for delay in delays]
    root, num_cut = tmp_path / "checkpoints", 0
    for step in (0, 1):
        save_checkpoint(root, make(step))
    for number, delay_s in kills:
        step = list_steps(root)[-1] + 1
        child = warm.start(ACT, "save", str(root), number, step)
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


def test_01_without_the_rename_a_killed_save_would_be_offered(warm, tmp_path):
    """The control: written in place, some kills leave a step that is listed and cannot be loaded."""
    num_bad = 0
    for number in (2, 3, 4):
        root = tmp_path / f"in place {number}"
        warm.wait(warm.start(ACT, "save in place", str(root), number, 1))
        for step in list_steps(root):
            try:
                load_checkpoint(step_folder(root, step))
            except CheckpointError:
                num_bad += 1
    assert num_bad > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_01_a_run_killed_again_and_again_equals_one_never_stopped(warm, tally, world):
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
    last = warm.expect(warm.command("train", str(path), *longer, "--name", "killed", "--train.async_save", "true"))
    assert warm.wait(whole, 300) == 0, whole.output
    assert "resuming from step" in last
    assert digests(world.folder / "killed", 100) == digests(world.folder / "whole", 100)
    assert metrics(world.folder / "killed") == metrics(world.folder / "whole")


def test_01_a_run_killed_after_its_first_step_goes_on_however_slow_its_saves_are(warm, tally, world):
    path = world.write_recipe(train={"steps": 4, "save_every": 2, "log_every": 1, "async_save": True})
    slow = [{"point": "save", "step": 0, "act": "slow", "seconds": 1.5}]
    child = warm.command("train", str(path), env=faults(*slow))
    wait_for_records(world.folder / "run", 1)
    child.kill()
    tally.inject()
    warm.wait(child)
    again = warm.expect(warm.command("train", str(path)))
    assert "resuming from step" in again


def test_01_leftovers_of_a_killed_save_do_not_stay(tmp_path):
    save_checkpoint(tmp_path, make(1))
    shutil.copytree(step_folder(tmp_path, 1), tmp_path / ".partial-0-step-00000002")
    assert list_steps(tmp_path) == [1]
    clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# Row 3: A step that was saved is never written again, so a kill while it is saved once more cannot harm it.

OTHER = 100


@pytest.mark.parametrize("count", [pytest.param(8, id="some"), pytest.param(100, id="many", marks=pytest.mark.stress)])
@pytest.mark.timeout(900)
def test_03_the_older_one_still_loads(warm, tally, tmp_path, count):
    save_checkpoint(tmp_path, make(1))
    started = time.monotonic()
    warm.run(ACT, "save", str(tmp_path), 0, 1, OTHER)
    duration_s = time.monotonic() - started
    for delay_s in numpy_stream(1, "kills").uniform(0, duration_s, count).tolist():
        child = warm.start(ACT, "save", str(tmp_path), 0, 1, OTHER)
        time.sleep(delay_s)
        child.kill()
        tally.inject()
        warm.wait(child)
        assert list_steps(tmp_path) == [1] and loads_as_made(tmp_path, 1)
        clear_leftovers(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_03_written_in_place_the_older_one_would_be_lost(warm, tmp_path):
    """The control: kills at file operations leave files of two saves, or a part of one."""
    fates = []
    for number in (2, 3, 4):
        root = tmp_path / str(number)
        save_checkpoint(root, make(1))
        assert warm.wait(warm.start(ACT, "save in place", str(root), number, 1, OTHER)) < 0
        try:
            fates.append("old" if is_same(load_checkpoint(step_folder(root, 1)), make(1)) else "other")
        except CheckpointError:
            fates.append("lost")
    assert "lost" in fates, fates


# Row 4: Deleting old checkpoints, killed at any moment, leaves at least `train.keep` complete ones, and never half a
# one.

KEEP = 2


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Six complete checkpoints, to be copied."""
    for step in range(6):
        save_checkpoint(tmp_path / "full", make(step))
    return tmp_path / "full"


def count(warm, full: Path) -> int:
    root = shutil.copytree(full, full.with_name("counted"))
    num_operations = int(warm.run(ACT, "retain", str(root), 0, KEEP))
    assert list_steps(root) == [4, 5]
    return num_operations


@pytest.mark.parametrize("most", [pytest.param(8, id="some"), pytest.param(100, id="many", marks=pytest.mark.stress)])
@pytest.mark.timeout(900)
def test_04_complete_ones_are_never_fewer_than_asked_for(warm, tally, full, most):
    num_operations = count(warm, full)
    assert num_operations >= 12
    for number in range(1, num_operations + 1, max(1, num_operations // most)):
        root = full.with_name(f"killed {number}")
        shutil.copytree(full, root)
        tally.inject()
        assert warm.wait(warm.start(ACT, "retain", str(root), number, KEEP)) < 0
        steps = list_steps(root)
        assert len(steps) >= KEEP and steps[-KEEP:] == [4, 5]
        assert all(loads_as_made(root, step) for step in steps)
        clear_leftovers(root)
        warm.run(ACT, "retain", str(root), 0, KEEP)
        assert sorted(path.name for path in root.iterdir()) == ["step-00000004", "step-00000005"]
        shutil.rmtree(root)


def test_04_without_the_rename_half_a_checkpoint_would_be_offered(warm, full):
    """The control: the same kills, with folders deleted where they are."""
    num_bad = 0
    for number in range(3, count(warm, full), 4):
        root = full.with_name(f"in place {number}")
        shutil.copytree(full, root)
        warm.wait(warm.start(ACT, "retain in place", str(root), number, KEEP))
        for step in list_steps(root)[:-KEEP]:
            try:
                load_checkpoint(step_folder(root, step))
            except CheckpointError:
                num_bad += 1
    assert num_bad > 0


# Row 9: What is saved in the background is the moment of the save, whatever comes next; an error there is told soon.

COUNT = 50


def change_after_saving(saver: Saver, count: int) -> None:
    for step in range(count):
        checkpoint = make(step, size=20_000)
        saver.save(checkpoint)
        for tensors in checkpoint.tensors.values():
            for tensor in tensors.values():
                tensor.add_(1.0)  # the next step
    saver.wait()


def test_09_saved_is_the_moment_of_the_call_and_equals_a_save_that_is_waited_for(tmp_path, tally):
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


def test_09_without_the_copy_later_weights_would_be_saved(tmp_path, monkeypatch):
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
def test_09_an_error_of_the_writer_ends_the_run_by_the_next_step(warm, tally, world):
    """The save of step 2 fails on purpose, and the next save, which would tell too, is thirty steps away."""
    path = world.write_recipe(train={"steps": 62, "save_every": 30, "log_every": 1, "async_save": True})
    fault = [{"point": "save", "step": 30, "act": "raise", "message": "the writer fails"}]
    child = warm.command("train", str(path), env=faults(*fault))
    tally.inject()
    assert warm.wait(child) != 0
    assert "the writer fails" in child.output
    run = world.folder / "run"
    assert list_steps(run / "checkpoints") == [0]
    last = max(losses(run))
    assert 30 <= last < 50, f"noticed only after step {last}"
    warm.expect(warm.command("train", str(path)))
