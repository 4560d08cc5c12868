"""A rank that dies or stops ends its peers in time; a slow one is named; a run without progress is not restarted."""

from __future__ import annotations

import json
import signal
import time

import pytest

from frameloom.core.errors import RunError
from frameloom.training import stragglers as pace
from frameloom.training.run.resuming import MOST_RESTARTS, count_restart
from tests.faults.injection import VARIABLE
from tests.faults.runs import digests, losses

LIMIT_S = 8.0
# What a loaded machine may add to the waiting of a peer: words, and the closing of files.
SLACK_S = 25.0


def faults(*entries: dict[str, object]) -> dict[str, str]:
    return {VARIABLE: json.dumps(entries)}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("act", ["kill", pytest.param("stop", marks=pytest.mark.stress)])
def test_peers_of_a_lost_rank_end_in_time_and_the_restart_is_equal(warm, tally, world, act):
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
        children = warm.train_ranks([*words, name], num_ranks)
        assert [warm.wait(child) for child in children] == [0, 0], [child.output for child in children]
    assert losses(world.folder / "lost") == losses(world.folder / "whole")
    assert digests(world.folder / "lost", 6) == digests(world.folder / "whole", 6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slow_rank_is_named_within_twenty_steps(warm, tally, world):
    path = world.write_recipe(parallel={"data": 2})

    def train(name: str, steps: int, env: dict[str, str] | None = None) -> str:
        children = warm.train_ranks([str(path), "--name", name, "--train.steps", str(steps)], 2, env=env)
        assert [warm.wait(child, 280) for child in children] == [0, 0], [child.output for child in children]
        return children[0].output

    train("plain", 3)
    lines = map(json.loads, (world.folder / "plain" / "metrics.jsonl").read_text().splitlines())
    step_s = max(1 / line["train/steps_per_s"] for line in lines)
    tally.inject()
    slow = {"point": "pass", "rank": 1, "act": "slow", "seconds": max(0.3, 4 * step_s)}
    told = train("slow", 9, faults(slow))
    assert "rank 1 works" in told and "rank 0 works" not in told, told


def test_only_who_stands_out_is_called_slow():
    """The control of the comparison: even ranks, small differences and tiny steps are nobody's fault."""
    assert pace.find_slow([0.1, 0.5, 0.1, 0.12]) == {1: 0.1}
    assert pace.find_slow([0.1, 0.5]) == {1: 0.1}
    for even in ([0.1, 0.15], [0.1, 0.12, 0.19, 0.11], [0.001, 0.01]):
        assert pace.find_slow(even) == {}


def test_a_run_without_progress_is_restarted_three_times_and_no_more(tmp_path, tally):
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


@pytest.mark.slow
def test_the_command_refuses_the_fourth_restart(warm, tally, world):
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
