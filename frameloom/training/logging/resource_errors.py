"""Running out of memory, disk space or file handles beside training: an error in the log, and the run goes on."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from frameloom.core.logging import get_logger

_log = get_logger(__name__)
_RESOURCES = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def is_shortage(error: BaseException) -> bool:
    """Whether memory, disk space or file handles ran out, which may be otherwise at the next step."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno in _RESOURCES
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


@contextmanager
def outlasting_shortage(lost: str, tell: Callable[..., object] = _log.error) -> Iterator[None]:
    """A shortage in the block costs what is `lost`; any other error ends the run, because it would come again."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_shortage(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        tell("%s, for lack of resources (%s); training goes on", lost, reason)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
