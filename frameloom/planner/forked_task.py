"""Work done in a forked process while this one goes on."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import torch

from frameloom.core.errors import FrameloomError

Result = TypeVar("Result")


class ForkedTask(Generic[Result]):
    """`work` starts at once. It needs no pickling, its result does. Leaving the block ends what still runs.

    The other process has the memory of this one but none of its threads, and locks that they hold are never released.
    So with other threads, as in a server, or with `is_apart` False, the work is done here when `result` is called.
    """

    def __init__(self, work: Callable[[], Result], *, is_apart: bool = True) -> None:
        self._work: Callable[[], Result] | None = None
        if not is_apart or threading.active_count() > 1:
            self._work = work
            return
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(sender, work), daemon=True)
        self._process.start()
        sender.close()

    def result(self) -> Result:
        """Waits for it; an error of the work is raised here."""
        if self._work is not None:
            return self._work()
        try:
            is_good, found = self._receiver.recv()
        except EOFError:
            self._process.join()
            raise FrameloomError(
                f"a helping process ended with exit code {self._process.exitcode}, perhaps for want of memory; free "
                "some and try again"
            ) from None
        if not is_good:
            raise found
        return found  # type: ignore[no-any-return]

    def __enter__(self) -> ForkedTask[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._work is not None:
            return
        self._receiver.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


def _serve(sender: Connection, work: Callable[[], object]) -> None:
    # OpenMP threads do not survive a fork; the child would deadlock without this.
    torch.set_num_threads(1)
    try:
        sender.send((True, work()))
    except Exception as error:
        sender.send((False, error))


def can_fork() -> bool:
    """CUDA does not survive a fork."""
    return not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
