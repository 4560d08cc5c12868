"""A step that was saved is never written again, so a kill while it is saved once more cannot harm it."""

from __future__ import annotations

import time

import pytest

from frameloom.checkpoint.reader import list_steps, load_checkpoint, step_folder
from frameloom.checkpoint.writer import clear_leftovers
from frameloom.core.errors import CheckpointError
from frameloom.core.random import numpy_stream
from tests.checkpoint.saving import save_checkpoint
from tests.faults.kills import is_same, loads_as_made, make

OTHER = 100


@pytest.mark.parametrize("count", [pytest.param(8, id="some"), pytest.param(100, id="many", marks=pytest.mark.stress)])
@pytest.mark.timeout(900)
def test_the_older_one_still_loads(warm, tally, tmp_path, count):
    save_checkpoint(tmp_path, make(1))
    started = time.monotonic()
    warm.run("tests.faults.kills:save", str(tmp_path), 1, 0, OTHER)
    duration_s = time.monotonic() - started
    for delay_s in numpy_stream(1, "kills").uniform(0, duration_s, count).tolist():
        child = warm.start("tests.faults.kills:save", str(tmp_path), 1, 0, OTHER)
        time.sleep(delay_s)
        child.kill()
        tally.inject()
        warm.wait(child)
        assert list_steps(tmp_path) == [1] and loads_as_made(tmp_path, 1)
        clear_leftovers(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_written_in_place_the_older_one_would_be_lost(warm, tmp_path):
    """The control: kills at file operations leave files of two saves, or a part of one."""
    fates = []
    for number in (2, 3, 4):
        root = tmp_path / str(number)
        save_checkpoint(root, make(1))
        assert warm.wait(warm.start("tests.faults.kills:save_in_place", str(root), 1, number, OTHER)) < 0
        try:
            fates.append("old" if is_same(load_checkpoint(step_folder(root, 1)), make(1)) else "other")
        except CheckpointError:
            fates.append("lost")
    assert "lost" in fates, fates
