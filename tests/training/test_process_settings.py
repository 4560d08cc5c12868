"""Settings of the training process: the schedule of the garbage collector, and a limit on device memory."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from frameloom.core.errors import ConfigError
from frameloom.training.process_settings import limit_memory, memory_share, scheduled_garbage
from frameloom.training.train import train
from tests.training.test_loop import records


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


def make_garbage() -> weakref.ref[Ring]:
    return weakref.ref(Ring())


def test_rings_are_collected_after_the_steps_of_the_schedule_and_at_no_other_time() -> None:
    assert gc.isenabled()
    with scheduled_garbage(3) as collect:
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        for step in range(1, 10):
            garbage = make_garbage()
            assert collect(step) == (step % 3 == 0)
            assert (garbage() is None) == (step % 3 == 0)
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_without_a_schedule_the_collector_is_left_alone() -> None:
    with scheduled_garbage(None) as collect:
        assert gc.isenabled()
        garbage = make_garbage()
        assert not any(collect(step) for step in range(5))
        assert garbage() is not None
    gc.collect()
    assert garbage() is None


def test_the_collector_comes_back_after_an_error_and_stays_off_where_it_was_off() -> None:
    with pytest.raises(RuntimeError, match="stop"), scheduled_garbage(1):
        raise RuntimeError("stop")
    assert gc.isenabled()
    gc.disable()
    try:
        with scheduled_garbage(1):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_run_with_a_schedule_collects_on_it_and_trains_the_same(world) -> None:
    with pytest.raises(ConfigError, match="gc_every"):
        world.recipe("--train.gc_every", "0")
    plain = train(world.recipe("--name", "plain", "--train.steps", "4"))
    times = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2 and not gc.isenabled():
            times.append(info)

    gc.callbacks.append(note)
    try:
        scheduled = train(world.recipe("--name", "scheduled", "--train.steps", "4", "--train.gc_every", "2"))
    finally:
        gc.callbacks.remove(note)
    assert len(times) == 2
    assert records(plain, "train/loss") == records(scheduled, "train/loss")


def test_a_limit_of_memory_is_a_share_of_the_device(caplog: pytest.LogCaptureFixture) -> None:
    assert memory_share("20GB", 80 * 10**9) == memory_share("20GiB", 80 * 2**30) == 0.25 and memory_share(0.5, 1) == 0.5
    with pytest.raises(ConfigError, match="the device has 10 GB"):
        memory_share("20GB", 10**10)
    with caplog.at_level(logging.WARNING, logger="frameloom"):
        limit_memory("20GB", torch.device("cpu"))
    assert "no effect on the CPU" in caplog.text
