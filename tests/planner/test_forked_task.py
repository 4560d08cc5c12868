"""Work in a forked process: its result, its error, its death, and an end when nobody waits for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from frameloom.core.errors import ConfigError, FrameloomError
from frameloom.planner.forked_task import forked_task


@pytest.fixture
def alone(monkeypatch):
    """As in a command: a test process has threads that bring it its tests."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def test_the_result_comes_from_another_process_which_has_our_memory(alone):
    ours = [1, 2, 3]
    with forked_task(lambda: (os.getpid(), sum(ours))) as wait:
        pid, found = wait()
    assert found == 6 and pid != os.getpid()


def test_an_error_of_the_work_is_raised_here(alone):
    def fail() -> None:
        raise ConfigError("model.size: there is no size 'huge'")

    with forked_task(fail) as wait, pytest.raises(ConfigError, match="there is no size 'huge'"):
        wait()


def test_a_process_that_dies_is_told(alone):
    with (
        forked_task(lambda: os.kill(os.getpid(), signal.SIGKILL)) as wait,
        pytest.raises(FrameloomError, match="code -9"),
    ):
        wait()


def test_who_leaves_early_does_not_wait(alone):
    started = time.monotonic()
    with pytest.raises(KeyError), forked_task(lambda: time.sleep(60)):
        raise KeyError("an error of ours")
    assert time.monotonic() - started < 30


def test_beside_other_threads_it_is_done_here():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its thread waits for more
        with forked_task(os.getpid) as wait:
            assert wait() == os.getpid()


def test_torch_computes_in_both_processes() -> None:
    """Its threads do not survive a fork."""
    numbers = torch.ones(1200, 1200)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        here = (numbers @ numbers).exp2().sum()
        with forked_task(lambda: float((numbers @ numbers).exp2().sum())) as wait:
            assert wait() == float(here)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
