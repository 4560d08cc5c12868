"""One or both of two ranks killed during a save: nothing half-written is offered, and both go on from one step."""

from __future__ import annotations

import json

import pytest

from frameloom.checkpoint.reader import list_steps, load_checkpoint, load_latest, step_folder
from frameloom.core.random import numpy_stream
from tests.faults.injection import VARIABLE
from tests.faults.runs import digests, losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 6


def die_in_save(words: list[str], dying: list[int], step: int, number: int) -> None:
    """`frameloom train` that dies before file operation `number` of the save of a step, on the ranks that are named."""
    import os

    from frameloom.checkpoint.writer import Saver
    from tests.faults.kills import die_at
    from tests.faults.warm import run_command

    save = Saver.save

    def save_and_die(self: Saver, checkpoint: object) -> None:
        if checkpoint.step == step and int(os.environ["RANK"]) in dying:  # type: ignore[attr-defined]
            die_at(self._root, number)
        save(self, checkpoint)  # type: ignore[arg-type]

    Saver.save = save_and_die  # type: ignore[method-assign]
    run_command(["train", *words])


@pytest.mark.parametrize("count", [pytest.param(2, id="some"), pytest.param(30, id="many", marks=pytest.mark.stress)])
def test_both_ranks_go_on_from_one_complete_step(warm, tally, world, count):
    path = world.write_recipe(
        parallel={"data": 2, "zero": 1, "timeout_s": 20},
        train={"steps": STEPS, "save_every": 1, "log_every": 1, "keep": 9},
    )
    words = [str(path), "--name"]
    whole = warm.train_ranks([*words, "whole"], 2)
    assert [warm.wait(child) for child in whole] == [0, 0], [child.output for child in whole]
    draw = numpy_stream(2, "kills of ranks")
    num_cut = 0
    for trial in range(count):
        name = f"killed-{trial}"
        dying = [[0], [1], [0, 1]][int(draw.integers(3))] if count > 2 else [[0], [0, 1]][trial]
        step, number = int(draw.integers(1, STEPS)), int(draw.integers(1, 10))
        tally.inject()
        children = warm.ranks(
            "tests.faults.test_02_kill_two_ranks:die_in_save", [[*words, name], dying, step, number], 2
        )
        codes = [warm.wait(child, 120) for child in children]
        checkpoints = world.folder / name / "checkpoints"
        for kept in list_steps(checkpoints):
            load_checkpoint(step_folder(checkpoints, kept))
        latest = load_latest(checkpoints)
        assert latest is not None and latest.step >= step - 1
        num_cut += any(code < 0 for code in codes) and step not in list_steps(checkpoints)
        again = warm.train_ranks([*words, name], 2)
        assert [warm.wait(child) for child in again] == [0, 0], [child.output for child in again]
        assert losses(world.folder / name) == losses(world.folder / "whole")
        assert digests(world.folder / name, STEPS) == digests(world.folder / "whole", STEPS)
    assert num_cut > 0, "no kill came amid a save"


def test_a_rank_that_cannot_write_stops_both(warm, tally, world):
    """The save of one rank fails; nothing of it stays, and both end."""
    path = world.write_recipe(parallel={"data": 2, "zero": 1, "timeout_s": 20})
    fault = [{"point": "save", "rank": 1, "step": 2, "act": "raise", "message": "no room on this machine"}]
    tally.inject()
    children = warm.train_ranks([str(path)], 2, env={VARIABLE: json.dumps(fault)})
    codes = [warm.wait(child, 120) for child in children]
    assert all(code > 0 for code in codes), codes
    assert "no room on this machine" in children[0].output + children[1].output
    assert list_steps(world.folder / "run" / "checkpoints") == [0]
