"""A run goes on with another number of ranks: with two micro-batches a step to the bit, with four within rounding.

Two to four to one ranks, with other kinds of splitting, are in tests/distributed/test_runs.py.
"""

from __future__ import annotations

import pytest

from frameloom.checkpoint.reader import load_latest
from tests.distributed.jobs import largest_difference
from tests.faults.runs import losses
from tests.faults.warm import run_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OPTIM = {"lr": 1e-3, "eps": 1e-3, "clip_norm": None}


def train(warm, words: list[str], num_ranks: int) -> None:
    children = warm.train_ranks(words, num_ranks)
    codes = [warm.wait(child, 240) for child in children]
    assert codes == [0] * num_ranks, [child.output for child in children]


def move(warm, path, name: str, worlds: list[int], *more: str) -> None:
    """Two steps with each number of ranks."""
    for number, num_ranks in enumerate(worlds, start=1):
        train(warm, [str(path), "--name", name, "--train.steps", str(2 * number), *more], num_ranks)


@pytest.mark.parametrize(
    ("zero", "slots"),
    [
        (0, 2),
        pytest.param(1, 2, marks=pytest.mark.stress),
        pytest.param(2, 2, marks=pytest.mark.stress),
        pytest.param(3, 2, marks=pytest.mark.stress),
        pytest.param(0, 4, marks=pytest.mark.stress),
        pytest.param(2, 4, marks=pytest.mark.stress),
    ],
)
def test_one_two_and_one_rank_learn_what_one_does(warm, tally, world, zero, slots):
    path = world.write_recipe(optim=OPTIM, parallel={"data": slots, "zero": zero, "timeout_s": 120})
    tally.inject()
    move(warm, path, "moved", [1, 2, 1])
    move(warm, path, "alone", [1], "--train.steps", "6")
    moved, alone = world.folder / "moved", world.folder / "alone"
    assert sorted(losses(moved)) == list(range(1, 7))
    ours, theirs = (load_latest(run / "checkpoints") for run in (moved, alone))
    assert ours is not None and theirs is not None
    assert (ours.state["epoch"], ours.state["position"]) == (theirs.state["epoch"], theirs.state["position"])
    kinds = ("model", "ema", "optimizer")
    difference = max(largest_difference(ours.tensors[kind], theirs.tensors[kind]) for kind in kinds)
    # Several ranks log their losses from a sum in double precision.
    assert losses(moved) == pytest.approx(losses(alone), rel=1e-6)
    assert difference == 0 if slots == 2 else difference < 1e-6


def train_with_half_gradients(words: list[str]) -> None:
    """`frameloom train` with gradients averaged over ranks where they should be added up."""
    from frameloom.training import step

    sync = step.sync_gradients
    step.sync_gradients = lambda params, num_ranks, factor: sync(params, num_ranks, 0.5 * factor)
    run_command(["train", *words])


def test_a_wrong_scale_of_gradients_would_show(warm, world):
    """The control."""
    path = world.write_recipe(optim=OPTIM, parallel={"data": 2})
    words = [str(path), "--train.steps", "3", "--name"]
    children = warm.ranks("tests.faults.test_15_other_ranks:train_with_half_gradients", [[*words, "wrong"]], 2)
    assert [warm.wait(child, 240) for child in children] == [0, 0], [child.output for child in children]
    train(warm, [*words, "right"], 1)
    wrong, right = losses(world.folder / "wrong"), losses(world.folder / "right")
    assert wrong[1] == pytest.approx(right[1], rel=1e-6) and wrong[3] != pytest.approx(right[3], rel=1e-4)
