"""Processes of one machine: two on a run, signals, loader workers that die, and too little memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from itertools import islice
from multiprocessing import active_children

import pytest

from frameloom.checkpoint.reader import list_steps, load_latest
from frameloom.core.errors import RunError
from frameloom.training.feed import Feed, build_feed
from frameloom.training.run.folder import RunFolder
from tests.faults.injection import faults
from tests.faults.runs import digests, losses, metrics, wait_for_records

pytestmark = pytest.mark.slow

# Row 10: One process at a time on a run folder: a second one is refused by name; the lock of a dead one is taken
# over.

LONG = ("--train.steps", "100000", "--train.save_every", "100000")


def test_10_a_second_process_is_refused_and_a_dead_one_counts_for_nothing(warm, tally, world):
    path = str(world.write_recipe())
    first = warm.command("train", path, *LONG)
    wait_for_records(world.folder / "run", 2)
    second = warm.expect(warm.command("train", path), 2)
    assert f"in use by process {first.pid} on {socket.gethostname()}" in second
    tally.inject()
    first.kill()
    assert warm.wait(first) < 0
    assert (world.folder / "run" / "lock").exists(), "nothing stale to take over"
    warm.expect(warm.command("train", path))
    tally.inject()


def test_10_without_the_lock_two_would_write_one_run(tmp_path, monkeypatch):
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


# Row 16: SIGTERM and SIGINT save and leave with their own exit codes; a second one leaves at once; the run resumes
# equal.

STEPS = 40


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_16_a_signal_saves_and_the_run_goes_on_equal(warm, tally, world, number):
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
        warm.expect(warm.command("train", path, "--name", name))
    assert digests(world.folder / "stopped", STEPS) == digests(world.folder / "whole", STEPS)
    assert metrics(world.folder / "stopped") == metrics(world.folder / "whole")


def test_16_a_second_signal_leaves_at_once(warm, tally, world):
    """The step hangs on purpose, so that the first signal cannot be answered."""
    path = str(world.write_recipe(train={"steps": STEPS, "save_every": 1000, "log_every": 1}))
    fault = [{"point": "pass", "step": 4, "act": "slow", "seconds": 600}]
    child = warm.command("train", path, env=faults(*fault))
    wait_for_records(world.folder / "run", 3)
    tally.inject()
    child.kill(signal.SIGINT)
    time.sleep(1.0)
    child.kill(signal.SIGINT)
    assert warm.wait(child, 30) in (-signal.SIGINT, 128 + signal.SIGINT)
    assert list_steps(world.folder / "run" / "checkpoints") == [0]


def test_16_without_the_handler_the_steps_would_be_lost(warm, world):
    """The control."""
    path = str(world.write_recipe(train={"steps": STEPS, "save_every": 1000, "log_every": 1}))
    child = warm.start("tests.faults.test_processes:train_deaf", [path])
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


# Row 23: Loader workers that are killed, stopped, hang or raise: the run goes on with the same samples, or names the
# clip.
# Single faults inside of a read, crashes and quarantine are in tests/data/loading/test_loader_workers.py.

NUM_READ = 8


@pytest.fixture
def feed(world) -> Feed:
    return build_feed(world.recipe(), bad_clips=world.folder / "bad.jsonl")


def limit(feed: Feed, workers: int, timeout_s: float) -> Feed:
    feed.reader.data = feed.reader.data.model_copy(update={"timeout_s": timeout_s})
    return replace(feed, workers=workers)


def read(feed: Feed, victims: dict[int, int]) -> list[tuple[list[int], bytes]]:
    """Rows and pixels of some steps, with signals sent to a worker after some of them."""
    found = []
    source = feed.steps(0, 0, 1)
    for number, (batches, _) in enumerate(islice(source, NUM_READ)):
        found += [(batch.rows.tolist(), batch.pixels_BCFHW.numpy().tobytes()) for batch in batches]
        if number in victims:
            os.kill(active_children()[0].pid or 0, victims[number])
    source.close()
    assert not active_children()
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.timeout(300)
def test_23_a_worker_that_is_killed_or_stopped_is_replaced_in_time(feed, tally, number):
    wanted = read(replace(feed, workers=0), {})
    tally.inject(2)
    found = read(limit(feed, 1, 3.0), {1: number, 4: number})
    assert found == wanted


def test_23_without_the_deadline_a_stopped_worker_would_stall_the_run(feed):
    """The control: with a deadline far away, nothing more comes until the worker is killed."""
    source = limit(feed, 1, 10_000.0).steps(0, 0, 1)
    next(source)
    (victim,) = [child.pid for child in active_children()]
    assert victim is not None
    os.kill(victim, signal.SIGSTOP)
    found: list[object] = []
    reading = threading.Thread(target=lambda: found.extend(islice(source, NUM_READ)))
    reading.start()
    reading.join(6.0)
    assert reading.is_alive() and len(found) < NUM_READ
    os.kill(victim, signal.SIGKILL)
    reading.join(120.0)
    assert len(found) == NUM_READ
    source.close()


# Row 28: A bucket that does not fit in memory runs in halves, with the same result, also after a resume; others are
# untouched.
# Ranks that agree on it, split weights, preflight and a real shortage of memory are in
# tests/training/memory/test_oom_split.py.


def shortage(bucket: str | None, most: int) -> dict[str, str]:
    """Memory is out where more than `most` samples run at once."""
    place = {} if bucket is None else {"bucket": bucket}
    return faults({"point": "pass", "act": "memory", "samples_over": most, **place})


def find_bucket(world) -> str:
    """The bucket of the first step that has at least three samples."""
    from frameloom.training.feed import build_feed

    feed = build_feed(world.recipe(), bad_clips=world.folder / "bad.jsonl")
    plan = feed.plan(0)
    index = next(index for index in range(5) if len(plan.rows(index)) > 2)
    return feed.policy.buckets[plan.buckets[index]].name


def test_28_one_bucket_is_halved_and_all_numbers_stay(warm, tally, world):
    path, bucket = str(world.write_recipe()), find_bucket(world)
    tally.inject()
    first = warm.expect(warm.command("train", path, "--name", "short", "--train.steps", "4", env=shortage(bucket, 2)))
    assert f"samples of bucket {bucket} do not fit in memory" in first
    assert first.count("do not fit in memory") == 1, "others were touched"
    saved = load_latest(world.folder / "short" / "checkpoints")
    assert saved is not None and saved.state["halved"] == {bucket: 2}
    again = warm.expect(warm.command("train", path, "--name", "short", env=shortage(bucket, 2)))
    assert "do not fit in memory" not in again, "the resumed run had to learn it again"
    warm.expect(warm.command("train", path, "--name", "whole"))
    assert losses(world.folder / "short") == pytest.approx(losses(world.folder / "whole"), rel=1e-6)


def test_28_where_not_even_one_fits_there_is_advice(warm, tally, world):
    tally.inject()
    child = warm.expect(warm.command("train", str(world.write_recipe()), env=shortage(None, 0)), 2)
    assert "not even one sample fits in memory" in child and "train.recompute" in child


def test_28_without_halving_the_run_would_end(warm, world):
    """The control."""
    child = warm.expect(
        warm.command("train", str(world.write_recipe()), "--train.oom_split", "false", env=shortage(None, 2)), 2
    )
    assert "train.oom_split is false" in child
