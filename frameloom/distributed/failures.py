"""On failure exactly one rank reports the error; the others exit quietly.

The rank that fails first claims the report through the store that all ranks share. A rank that only notices that
another is gone finds the report claimed and raises PeerFailed. Rank 0 has a short lead: most mistakes are found by all
ranks at the same time, and are best reported without a rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from frameloom.core.errors import FrameloomError, PeerFailed, RunError

_KEY = "frameloom/word"
_LEAD_S = 1.0
_PATIENCE_S = 5.0
_QUIET_S = 3.0
_LOST = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL", "ncclRemoteError")


@contextmanager
def report_once(rank: int, store: Store) -> Iterator[None]:
    """Let one rank raise an error of the block; on the others it becomes PeerFailed.

    Those wait a little: torchrun ends all ranks when the first one is gone, and that should be the one that reports.
    """
    try:
        with _one_reporter(rank, store):
            yield
    except PeerFailed:
        time.sleep(_QUIET_S)
        raise


@contextmanager
def _one_reporter(rank: int, store: Store) -> Iterator[None]:
    try:
        yield
    except PeerFailed:
        raise
    except FrameloomError as error:
        if not _claim_report(rank, store):
            raise PeerFailed(error.exit_code) from error
        if rank:
            error.args = (f"rank {rank}: {error}",)
        raise
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)):
            _claim_report(rank, store)
            raise
        # The rank that failed has reported before it went; this is only a consequence.
        if _is_claimed(store):
            raise PeerFailed(RunError.exit_code) from error
        first_line = str(error).strip().partition("\n")[0][:200]
        raise RunError(
            f"rank {rank}: lost contact with another process ({first_line}); it was killed or its machine is "
            "gone. Start the same command again: it goes on where it was last saved"
        ) from error
    except BaseException:
        _claim_report(rank, store)
        raise


def _claim_report(rank: int, store: Store) -> bool:
    """Whether this rank reports. A store that is gone went with rank 0, which has reported or was killed."""
    if rank:
        time.sleep(_LEAD_S)
    try:
        return bool(store.add(_KEY, 1) == 1)
    except RuntimeError:
        return False


def _is_claimed(store: Store) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if store.add(_KEY, 0) > 0:
                return True
        except RuntimeError:
            return False
        time.sleep(0.2)
    return False


@contextmanager
def quiet_ranks(rank: int, keep_warnings: Sequence[logging.Logger] = ()) -> Iterator[None]:
    """Let ranks other than 0 log only errors, and the warnings of `keep_warnings`, with their rank in front."""
    if rank == 0:
        yield
        return
    root = logging.getLogger("frameloom")
    before = [(logger, logger.level) for logger in (root, *keep_warnings)]

    def mark(record: logging.LogRecord) -> bool:
        record.msg = f"rank {rank}: {record.msg}"
        return True

    root.setLevel(logging.ERROR)
    for logger in keep_warnings:
        logger.setLevel(logging.WARNING)
    handlers = list(root.handlers)
    for handler in handlers:
        handler.addFilter(mark)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
        for handler in handlers:
            handler.removeFilter(mark)
