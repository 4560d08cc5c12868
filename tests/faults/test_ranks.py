"""Several ranks: killed, stopped, slow, without each other's files, or another number of them after a resume."""

from __future__ import annotations

import json
import shutil
import signal
import time

import pytest

from frameloom.checkpoint.reader import list_steps, load_checkpoint, load_latest, step_folder
from frameloom.core.errors import RunError
from frameloom.core.random import numpy_stream
from frameloom.training import stragglers as pace
from frameloom.training.run.resuming import MOST_RESTARTS, count_restart
from tests.distributed.jobs import largest_difference
from tests.faults.injection import faults
from tests.faults.runs import digests, losses
from tests.faults.warm import run_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Row 2: One or both of two ranks killed during a save: nothing half-written is offered, and both go on from one step.

STEPS = 6


def die_in_save(words: list[str], dying: list[int], step: int, number: int) -> None:
    """`frameloom train` that dies before file operation `number` of the save of a step, on the ranks that are named."""
    import os

    from frameloom.checkpoint.writer import Saver
    from tests.faults.kills import watch
    from tests.faults.warm import run_command

    save = Saver.save

    def save_and_die(self: Saver, checkpoint: object) -> None:
        if checkpoint.step == step and int(os.environ["RANK"]) in dying:  # type: ignore[attr-defined]
            watch(self._root, number)
        save(self, checkpoint)  # type: ignore[arg-type]

    Saver.save = save_and_die  # type: ignore[method-assign]
    run_command(["train", *words])


@pytest.mark.parametrize("count", [pytest.param(2, id="some"), pytest.param(30, id="many", marks=pytest.mark.stress)])
def test_02_both_ranks_go_on_from_one_complete_step(warm, tally, world, count):
    path = world.write_recipe(
        parallel={"data": 2, "zero": 1, "timeout_s": 20},
        train={"steps": STEPS, "save_every": 1, "log_every": 1, "keep": 9},
    )
    words = [str(path), "--name"]
    warm.expect_all(warm.train_ranks([*words, "whole"], 2))
    draw = numpy_stream(2, "kills of ranks")
    num_cut = 0
    for trial in range(count):
        name = f"killed-{trial}"
        dying = [[0], [1], [0, 1]][int(draw.integers(3))] if count > 2 else [[0], [0, 1]][trial]
        step, number = int(draw.integers(1, STEPS)), int(draw.integers(1, 10))
        tally.inject()
        children = warm.ranks("tests.faults.test_ranks:die_in_save", [[*words, name], dying, step, number], 2)
        codes = [warm.wait(child, 120) for child in children]
        checkpoints = world.folder / name / "checkpoints"
        for kept in list_steps(checkpoints):
            load_checkpoint(step_folder(checkpoints, kept))
        latest = load_latest(checkpoints)
        assert latest is not None and latest.step >= step - 1
        num_cut += any(code < 0 for code in codes) and step not in list_steps(checkpoints)
        warm.expect_all(warm.train_ranks([*words, name], 2))
        assert losses(world.folder / name) == losses(world.folder / "whole")
        assert digests(world.folder / name, STEPS) == digests(world.folder / "whole", STEPS)
    assert num_cut > 0, "no kill came amid a save"


def test_02_a_rank_that_cannot_write_stops_both(warm, tally, world):
    """The save of one rank fails; nothing of it stays, and both end."""
    path = world.write_recipe(parallel={"data": 2, "zero": 1, "timeout_s": 20})
    fault = [{"point": "save", "rank": 1, "step": 2, "act": "raise", "message": "no room on this machine"}]
    tally.inject()
    children = warm.train_ranks([str(path)], 2, env=faults(*fault))
    codes = [warm.wait(child, 120) for child in children]
    assert all(code > 0 for code in codes), codes
    assert "no room on this machine" in children[0].output + children[1].output
    assert list_steps(world.folder / "run" / "checkpoints") == [0]


# Row 8: A run folder that not all ranks see: all go on from one step, or all stop with a message; none waits for
# ever.

TRAIN = "tests.faults.runs:train_in_own_folder"
RANKS = 2


def train_apart(warm, world, steps: int) -> tuple[list[int], list[str]]:
    """Each rank in a folder of its own, which it takes for the run's."""
    words = [str(world.folder / "recipe.yaml"), "--run.folder", "runs", "--train.steps", str(steps)]
    children = warm.ranks(TRAIN, [str(world.folder), words], RANKS)
    return [warm.wait(child, 120) for child in children], [child.output for child in children]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("zero", [0, pytest.param(2, marks=pytest.mark.stress)])
def test_08_ranks_that_see_other_files_stop_together_or_go_on_alike(warm, tally, world, zero):
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


# Row 15: A run goes on with another number of ranks: with two micro-batches a step to the bit, with four within
# rounding.
# Two to four to one ranks, with other kinds of splitting, are in tests/distributed/test_runs.py.

OPTIM = {"lr": 1e-3, "eps": 1e-3, "clip_norm": None}


def move(warm, path, name: str, worlds: list[int], *more: str) -> None:
    """Two steps with each number of ranks."""
    for number, num_ranks in enumerate(worlds, start=1):
        words = [str(path), "--name", name, "--train.steps", str(2 * number), *more]
        warm.expect_all(warm.train_ranks(words, num_ranks))


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
def test_15_one_two_and_one_rank_learn_what_one_does(warm, tally, world, zero, slots):
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


def test_15_a_wrong_scale_of_gradients_would_show(warm, world):
    """The control."""
    path = world.write_recipe(optim=OPTIM, parallel={"data": 2})
    words = [str(path), "--train.steps", "3", "--name"]
    warm.expect_all(warm.ranks("tests.faults.test_ranks:train_with_half_gradients", [[*words, "wrong"]], 2))
    warm.expect_all(warm.train_ranks([*words, "right"], 1))
    wrong, right = losses(world.folder / "wrong"), losses(world.folder / "right")
    assert wrong[1] == pytest.approx(right[1], rel=1e-6) and wrong[3] != pytest.approx(right[3], rel=1e-4)


# Row 29: A rank that dies or stops ends its peers in time; a slow one is named; a run without progress is not
# restarted.

LIMIT_S = 8.0
# What a loaded machine may add to the waiting of a peer: words, and the closing of files.
SLACK_S = 25.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("act", ["kill", pytest.param("stop", marks=pytest.mark.stress)])
def test_29_peers_of_a_lost_rank_end_in_time_and_the_restart_is_equal(warm, tally, world, act):
    path = world.write_recipe(parallel={"data": 2, "timeout_s": LIMIT_S})
    words = [str(path), "--train.steps", "6", "--name"]
    tally.inject()
    struck = {"point": "pass", "rank": 1, "step": 4, "act": act}
    first, second = warm.train_ranks([*words, "lost"], 2, env=faults(struck))
    started = None
    while started is None:
        if (world.folder / "lost" / "metrics.jsonl").is_file() and len(losses(world.folder / "lost")) >= 3:
            started = time.monotonic()
        time.sleep(0.05)
    assert warm.wait(first, LIMIT_S + SLACK_S) == 2, first.output
    assert "lost contact" in first.output or "another process" in first.output
    if act == "stop":
        second.kill(signal.SIGKILL)
    assert warm.wait(second) == -signal.SIGKILL
    for name, num_ranks in (("lost", 2), ("whole", 2)):
        warm.expect_all(warm.train_ranks([*words, name], num_ranks))
    assert losses(world.folder / "lost") == losses(world.folder / "whole")
    assert digests(world.folder / "lost", 6) == digests(world.folder / "whole", 6)


@pytest.mark.timeout(600)
def test_29_a_slow_rank_is_named_within_twenty_steps(warm, tally, world):
    path = world.write_recipe(parallel={"data": 2})

    def train(name: str, steps: int, env: dict[str, str] | None = None) -> str:
        words = [str(path), "--name", name, "--train.steps", str(steps)]
        return warm.expect_all(warm.train_ranks(words, 2, env=env))[0]

    train("plain", 3)
    lines = map(json.loads, (world.folder / "plain" / "metrics.jsonl").read_text().splitlines())
    step_s = max(1 / line["train/steps_per_s"] for line in lines)
    tally.inject()
    slow = {"point": "pass", "rank": 1, "act": "slow", "seconds": max(0.3, 4 * step_s)}
    told = train("slow", 9, faults(slow))
    assert "rank 1 works" in told and "rank 0 works" not in told, told


def test_29_only_who_stands_out_is_called_slow():
    """The control of the comparison: even ranks, small differences and tiny steps are nobody's fault."""
    assert pace.find_slow([0.1, 0.5, 0.1, 0.12]) == {1: 0.1}
    assert pace.find_slow([0.1, 0.5]) == {1: 0.1}
    for even in ([0.1, 0.15], [0.1, 0.12, 0.19, 0.11], [0.001, 0.01]):
        assert pace.find_slow(even) == {}


def test_29_a_run_without_progress_is_restarted_three_times_and_no_more(tmp_path, tally):
    by_itself = {"TORCHELASTIC_RESTART_COUNT": "1"}
    tally.inject()
    for _ in range(MOST_RESTARTS):
        count_restart(tmp_path, 7, by_itself)
    with pytest.raises(RunError, match=r"3 restarts in a row have not come beyond step 7"):
        count_restart(tmp_path, 7, by_itself)
    # Progress, or a start by hand, counts anew.
    count_restart(tmp_path, 9, by_itself)
    for _ in range(MOST_RESTARTS - 1):
        count_restart(tmp_path, 9, by_itself)
    count_restart(tmp_path, 9, {})
    count_restart(tmp_path, 9, {"SLURM_RESTART_COUNT": "4"})


def test_29_the_command_refuses_the_fourth_restart(warm, tally, world):
    path = str(world.write_recipe())
    hopeless = faults({"point": "pass", "step": 4, "act": "kill"})
    tally.inject()
    codes = []
    for number in range(MOST_RESTARTS + 2):
        child = warm.command("train", path, env=hopeless | {"TORCHELASTIC_RESTART_COUNT": str(number)})
        codes.append(warm.wait(child))
    assert codes == [-signal.SIGKILL] * (MOST_RESTARTS + 1) + [2], codes
    assert "start the run by hand" in child.output
    assert warm.wait(warm.command("train", path)) == 0
