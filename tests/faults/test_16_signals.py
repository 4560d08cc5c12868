"""SIGTERM and SIGINT save and leave with their own exit codes; a second one leaves at once; the run resumes equal."""

from __future__ import annotations

import json
import signal
import time

import pytest

from frameloom.checkpoint.reader import list_steps
from tests.faults.injection import VARIABLE
from tests.faults.runs import digests, metrics, wait_for_records

pytestmark = pytest.mark.slow
STEPS = 40


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on_equal(warm, tally, world, number):
    path = str(world.write_recipe(train={"steps": STEPS, "save_every": 1000, "log_every": 1}))
    child = warm.command("train", path, "--name", "stopped")
    wait_for_records(world.folder / "stopped", 3)
    tally.inject()
    started = time.monotonic()
    child.kill(number)
    assert warm.wait(child, 60) == 128 + number, child.output
    assert time.monotonic() - started < 60
    saved = list_steps(world.folder / "stopped" / "checkpoints")[-1]
    assert 3 <= saved < STEPS and f"saved step {saved}" in child.output
    for name in ("stopped", "whole"):
        again = warm.command("train", path, "--name", name)
        assert warm.wait(again) == 0, again.output
    assert digests(world.folder / "stopped", STEPS) == digests(world.folder / "whole", STEPS)
    assert metrics(world.folder / "stopped") == metrics(world.folder / "whole")


def test_a_second_signal_leaves_at_once(warm, tally, world):
    """The step hangs on purpose, so that the first signal cannot be answered."""
    path = str(world.write_recipe(train={"steps": STEPS, "save_every": 1000, "log_every": 1}))
    fault = [{"point": "pass", "step": 4, "act": "slow", "seconds": 600}]
    child = warm.command("train", path, env={VARIABLE: json.dumps(fault)})
    wait_for_records(world.folder / "run", 3)
    tally.inject()
    child.kill(signal.SIGINT)
    time.sleep(1.0)
    child.kill(signal.SIGINT)
    assert warm.wait(child, 30) in (-signal.SIGINT, 128 + signal.SIGINT)
    assert list_steps(world.folder / "run" / "checkpoints") == [0]


def test_without_the_handler_the_steps_would_be_lost(warm, world):
    """The control."""
    path = str(world.write_recipe(train={"steps": STEPS, "save_every": 1000, "log_every": 1}))
    child = warm.start("tests.faults.test_16_signals:train_deaf", [path])
    wait_for_records(world.folder / "run", 3)
    child.kill(signal.SIGTERM)
    assert warm.wait(child, 60) == -signal.SIGTERM
    assert list_steps(world.folder / "run" / "checkpoints") == [0]


def train_deaf(words: list[str]) -> None:
    from contextlib import nullcontext

    from frameloom.training import train
    from tests.faults.warm import run_command

    train.stop_on_signals = lambda trainer: nullcontext()
    run_command(["train", *words])
