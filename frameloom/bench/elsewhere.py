"""Sides that run in a process of their own, as their users would start it.

What our commands set for their process, above all how it keeps memory, is then not lent to the other side. Between its
turns the process waits and takes no processor time.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

from frameloom.bench.harness import Side, Work
from frameloom.core.host_memory import keep_freed_memory
from frameloom.core.processes import end_with_parent

_LIMIT_S = 300.0


class Elsewhere(AbstractContextManager["Elsewhere"]):
    """A process that builds one side after another; `keeps_memory` gives it the memory setting of our commands."""

    def __init__(self, *, keeps_memory: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, keeps_memory), daemon=True)
        self._process.start()
        theirs.close()

    def build(self, build: Callable[..., Work], *arguments: object) -> RemoteSide:
        """The side that `build(*arguments)` makes over there; the one before is gone."""
        self.ask((build, arguments))
        return RemoteSide(self)

    def ask(self, message: object) -> Any:
        self._connection.send(message)
        if not self._connection.poll(_LIMIT_S):
            self._process.terminate()  # a late answer would be taken for that of the next question
            raise TimeoutError(f"the process of the other side gave no answer for {_LIMIT_S:.0f} s")
        try:
            return self._connection.recv()
        except EOFError as error:
            self._process.join()
            raise RuntimeError(
                f"the process of the other side ended with exit code {self._process.exitcode}; its trace is above"
            ) from error

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.terminate()


class RemoteSide:
    """Is timed where it runs."""

    def __init__(self, place: Elsewhere) -> None:
        self._place = place

    def time(self) -> tuple[float, float]:
        wall, cpu = self._place.ask(None)
        return wall, cpu


def _serve(connection: Connection, keeps_memory: bool) -> None:
    """Build what a message describes, run it for an empty one; an error ends the process with its trace."""
    end_with_parent()
    if keeps_memory:
        keep_freed_memory()
    side: Side | None = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        if message is None:
            assert side is not None, "nothing was built yet"
            connection.send(side.time())
        else:
            side = None  # its memory is free before the next one takes some
            build, arguments = message
            side = Side(build(*arguments))
            connection.send(True)
