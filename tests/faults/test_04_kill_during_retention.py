"""Deleting old checkpoints, killed at any moment, leaves at least `train.keep` complete ones, and never half a one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from frameloom.checkpoint.reader import list_steps, load_checkpoint, step_folder
from frameloom.checkpoint.writer import clear_leftovers
from frameloom.core.errors import CheckpointError
from tests.checkpoint.saving import save_checkpoint
from tests.faults.kills import loads_as_made, make

KEEP = 2


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Six complete checkpoints, to be copied."""
    for step in range(6):
        save_checkpoint(tmp_path / "full", make(step))
    return tmp_path / "full"


def count(warm, full: Path) -> int:
    root, out = full.with_name("counted"), full.with_name("count")
    shutil.copytree(full, root)
    warm.run("tests.faults.kills:count_retain", str(root), KEEP, str(out))
    assert list_steps(root) == [4, 5]
    return int(out.read_text())


@pytest.mark.parametrize("most", [pytest.param(8, id="some"), pytest.param(100, id="many", marks=pytest.mark.stress)])
@pytest.mark.timeout(900)
def test_complete_ones_are_never_fewer_than_asked_for(warm, tally, full, most):
    num_operations = count(warm, full)
    assert num_operations >= 12
    for number in range(1, num_operations + 1, max(1, num_operations // most)):
        root = full.with_name(f"killed {number}")
        shutil.copytree(full, root)
        tally.inject()
        assert warm.wait(warm.start("tests.faults.kills:retain", str(root), KEEP, number)) < 0
        steps = list_steps(root)
        assert len(steps) >= KEEP and steps[-KEEP:] == [4, 5]
        assert all(loads_as_made(root, step) for step in steps)
        clear_leftovers(root)
        warm.run("tests.faults.kills:retain", str(root), KEEP)
        assert sorted(path.name for path in root.iterdir()) == ["step-00000004", "step-00000005"]
        shutil.rmtree(root)


def test_without_the_rename_half_a_checkpoint_would_be_offered(warm, full):
    """The control: the same kills, with folders deleted where they are."""
    num_bad = 0
    for number in range(3, count(warm, full), 4):
        root = full.with_name(f"in place {number}")
        shutil.copytree(full, root)
        warm.wait(warm.start("tests.faults.kills:retain_in_place", str(root), KEEP, number))
        for step in list_steps(root)[:-KEEP]:
            try:
                load_checkpoint(step_folder(root, step))
            except CheckpointError:
                num_bad += 1
    assert num_bad > 0
