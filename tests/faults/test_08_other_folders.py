"""A run folder that not all ranks see: all go on from one step, or all stop with a message; none waits for ever."""

from __future__ import annotations

import shutil

import pytest

from tests.faults.runs import losses

TRAIN = "tests.faults.runs:train_in_own_folder"
RANKS = 2


def train_apart(warm, world, steps: int) -> tuple[list[int], list[str]]:
    """Each rank in a folder of its own, which it takes for the run's."""
    words = [str(world.folder / "recipe.yaml"), "--run.folder", "runs", "--train.steps", str(steps)]
    children = warm.ranks(TRAIN, [str(world.folder), words], RANKS)
    return [warm.wait(child, 120) for child in children], [child.output for child in children]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("zero", [0, pytest.param(2, marks=pytest.mark.stress)])
def test_ranks_that_see_other_files_stop_together_or_go_on_alike(warm, tally, world, zero):
    world.write_recipe(parallel={"zero": zero, "data": 2, "timeout_s": 30})
    for rank in range(RANKS):
        (world.folder / f"rank-{rank}").mkdir()
    first, told = train_apart(warm, world, 2)
    tally.inject()
    if first == [0, 0]:  # one rank writes and reads for all
        shutil.rmtree(world.folder / "rank-1", ignore_errors=True)
        (world.folder / "rank-1").mkdir()
        second, told = train_apart(warm, world, 4)
        assert second == [0, 0] or all(code == 2 for code in second), told
        if second == [0, 0]:
            assert sorted(losses(world.folder / "rank-0" / "runs" / "run")) == [1, 2, 3, 4]
    else:
        assert first == [2, 2], told
    assert first == [0, 0] or any("share" in text or "sees" in text for text in told), told
