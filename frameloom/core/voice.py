"""One error, one message: of several processes that end, one says why and the others leave without a word.

Who fails first takes the word through the store that all processes share. A process that only notices that another is
gone finds the word taken and stays silent. The first process has a short lead, because most mistakes are found by all
at the same time and are best told without a rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from frameloom.core.errors import FrameloomError, RunError, SilentStop

_KEY = "frameloom/word"
_LEAD_S = 1.0
_PATIENCE_S = 5.0
_SILENCE_S = 3.0
_LOST = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL", "ncclRemoteError")


@contextmanager
def speak_once(rank: int, store: Store) -> Iterator[None]:
    """Let one process tell an error of the block; on the others it becomes a SilentStop.

    A silent one waits a little: torchrun ends all processes when the first one is gone, and that should be the speaker.
    """
    try:
        with _one_speaker(rank, store):
            yield
    except SilentStop:
        time.sleep(_SILENCE_S)
        raise


@contextmanager
def _one_speaker(rank: int, store: Store) -> Iterator[None]:
    try:
        yield
    except SilentStop:
        raise
    except FrameloomError as error:
        if not _take_word(rank, store):
            raise SilentStop(error.exit_code) from error
        if rank:
            error.args = (f"rank {rank}: {error}",)
        raise
    except RuntimeError as error:
        if not is_lost_contact(error):
            _take_word(rank, store)
            raise
        # Whoever failed spoke before it went; this is only a consequence.
        if _is_taken(store):
            raise SilentStop(RunError.exit_code) from error
        raise RunError(
            f"rank {rank}: lost contact with another process ({_first_line(error)}); it was killed or its machine is "
            "gone. Start the same command again: it goes on where it was last saved"
        ) from error
    except BaseException:
        _take_word(rank, store)
        raise


def is_lost_contact(error: RuntimeError) -> bool:
    """Whether an error came from a process that is gone, not from this one."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)


def _take_word(rank: int, store: Store) -> bool:
    """Whether this process may speak; a store that is gone went with the first process, which spoke or was killed."""
    if rank:
        time.sleep(_LEAD_S)
    try:
        return bool(store.add(_KEY, 1) == 1)
    except RuntimeError:
        return False


def _is_taken(store: Store) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if store.add(_KEY, 0) > 0:
                return True
        except RuntimeError:
            return False
        time.sleep(0.2)
    return False


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


class _Rank(logging.Filter):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self._prefix = f"rank {rank}: "

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = self._prefix + str(record.msg)
        return True


@contextmanager
def hushed(rank: int) -> Iterator[None]:
    """Let a process other than the first log only errors, and what its own loader workers do."""
    if rank == 0:
        yield
        return
    root, own = logging.getLogger("frameloom"), logging.getLogger("frameloom.data.workers")
    before, mark = (root.level, own.level), _Rank(rank)
    root.setLevel(logging.ERROR)
    own.setLevel(logging.WARNING)
    handlers = list(root.handlers)
    for handler in handlers:
        handler.addFilter(mark)
    try:
        yield
    finally:
        root.setLevel(before[0])
        own.setLevel(before[1])
        for handler in handlers:
            handler.removeFilter(mark)
