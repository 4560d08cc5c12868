"""One process at a time on a run folder: a second one is refused by name; the lock of a dead one is taken over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket

import pytest

from frameloom.core.errors import RunError
from frameloom.training.run.folder import RunFolder
from tests.faults.runs import wait_for_records

LONG = ("--train.steps", "100000", "--train.save_every", "100000")


@pytest.mark.slow
def test_a_second_process_is_refused_and_a_dead_one_counts_for_nothing(warm, tally, world):
    path = str(world.write_recipe())
    first = warm.command("train", path, *LONG)
    wait_for_records(world.folder / "run", 2)
    second = warm.command("train", path)
    assert warm.wait(second) == 2
    assert f"in use by process {first.pid} on {socket.gethostname()}" in second.output
    tally.inject()
    first.kill()
    assert warm.wait(first) < 0
    assert (world.folder / "run" / "lock").exists(), "nothing stale to take over"
    third = warm.command("train", path)
    assert warm.wait(third) == 0, third.output
    tally.inject()


def test_without_the_lock_two_would_write_one_run(tmp_path, monkeypatch):
    """The control."""
    folder = RunFolder(tmp_path / "run")
    with folder.locked(), pytest.raises(RunError, match=f"in use by process {os.getpid()}"), folder.locked():
        pass
    monkeypatch.setattr(fcntl, "flock", lambda file, operation: None)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    with contextlib.ExitStack() as held:
        held.enter_context(folder.locked())
        held.enter_context(folder.locked())
