"""Loader workers that are killed, stopped, hang or raise: the run goes on with the same samples, or names the clip.

Single faults inside of a read, crashes and quarantine are in tests/data/loading/test_loader_workers.py.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from itertools import islice
from multiprocessing import active_children

import pytest

from frameloom.training.feed import Feed, build_feed

pytestmark = pytest.mark.slow
STEPS = 8


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
    for number, (batches, _) in enumerate(islice(source, STEPS)):
        found += [(batch.rows.tolist(), batch.pixels_BCFHW.numpy().tobytes()) for batch in batches]
        if number in victims:
            os.kill(active_children()[0].pid or 0, victims[number])
    source.close()
    assert not active_children()
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_or_stopped_is_replaced_in_time(feed, tally, number):
    wanted = read(replace(feed, workers=0), {})
    tally.inject(2)
    found = read(limit(feed, 1, 3.0), {1: number, 4: number})
    assert found == wanted


def test_without_the_deadline_a_stopped_worker_would_stall_the_run(feed):
    """The control: with a deadline far away, nothing more comes until the worker is killed."""
    source = limit(feed, 1, 10_000.0).steps(0, 0, 1)
    next(source)
    (victim,) = [child.pid for child in active_children()]
    assert victim is not None
    os.kill(victim, signal.SIGSTOP)
    found: list[object] = []
    reading = threading.Thread(target=lambda: found.extend(islice(source, STEPS)))
    reading.start()
    reading.join(6.0)
    assert reading.is_alive() and len(found) < STEPS
    os.kill(victim, signal.SIGKILL)
    reading.join(120.0)
    assert len(found) == STEPS
    source.close()
