"""Work done in a forked process while this one goes on."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from frameloom.core.errors import FrameloomError

Result = TypeVar("Result")


@contextmanager
def forked_task(work: Callable[[], Result]) -> Iterator[Callable[[], Result]]:
    """Start `work` at once and yield the function that waits for its result and raises its error; leaving the block
    ends what still runs. The work needs no pickling, its result does.

    A forked process has the memory of this one but none of its threads, so locks that they hold would never be
    released, and CUDA does not survive a fork: where either is in use, as in a server, the work is done here when its
    result is asked for.
    """
    if threading.active_count() > 1 or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield work
        return
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, work), daemon=True)
    process.start()
    sender.close()

    def receive() -> Result:
        try:
            is_good, found = receiver.recv()
        except EOFError:
            process.join()
            raise FrameloomError(
                f"a helping process ended with exit code {process.exitcode}, perhaps for want of memory; free some and "
                "try again"
            ) from None
        if not is_good:
            raise found
        return found  # type: ignore[no-any-return]

    try:
        yield receive
    finally:
        receiver.close()
        if process.is_alive():
            process.kill()
        process.join()


def _serve(sender: Connection, work: Callable[[], object]) -> None:
    # OpenMP threads do not survive a fork; the child would deadlock without this.
    torch.set_num_threads(1)
    try:
        sender.send((True, work()))
    except Exception as error:
        sender.send((False, error))
