"""A supervised pool of worker processes, for work that may hang or crash its process.

Each worker writes to shared memory which task it is at, and since when. One that dies, or gives no sign of life for
longer than the limit, is killed and replaced, the caller decides about the task that it was at, and all other tasks are
done. Workers end with their parent, also after a SIGKILL. They are started by a fork server: a plain fork would copy
locks that threads of torch, polars or a decoder may hold at that moment, and fresh interpreters would each import torch
anew.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, NamedTuple, TypeVar

from frameloom.core.errors import FrameloomError

Task = TypeVar("Task")
Result = TypeVar("Result")
Heartbeat = Callable[[int], None]
"""Called by the work with a number, the note, which names what it is doing when it hangs or crashes."""

NO_NOTE = -1
# Imported by the fork server. polars must not be among them: it starts threads when imported, which a fork would lose.
PRELOAD = ("torch.utils.data", "PIL.Image", "frameloom.config.schema.recipe", "frameloom.data.curation.inspection")
_POLL_S = 0.5
_START_S = 300.0  # a new process may import torch, on a busy machine from a cold network disk
_END_S = 2.0
_STARTING, _IDLE = -2, -1
_FIELDS = 3  # of a worker in shared memory: task, note, since when in microseconds
_HEAD = struct.Struct("<Q")


class Lost(NamedTuple):
    """A worker that died or hung after its heartbeat `note`; `in_a_row` counts those without a result in between."""

    worker: int
    note: int
    what: str
    has_started: bool
    in_a_row: int


def send_pickle(sender: socket.socket, item: Any) -> None:
    """As multiprocessing's own pipes do; both ends are processes of this program."""
    data = ForkingPickler.dumps(item)
    sender.sendall(_HEAD.pack(len(data)) + data)


def receive_pickle(receiver: socket.socket) -> Any:
    """EOFError when the sender is gone."""
    data, wanted = b"", _HEAD.size
    while len(data) < wanted:
        part = receiver.recv(wanted - len(data))
        if not part:
            raise EOFError("the sender is gone")
        data += part
        if len(data) == _HEAD.size == wanted:
            wanted += _HEAD.unpack(data)[0]
    return ForkingPickler.loads(data[_HEAD.size :])


class ProcessPool(Generic[Task, Result]):
    """Runs `work` in `num_workers` processes, each of which has up to `ahead` tasks before it.

    `work` and tasks must survive pickling; a task is pickled when it is handed out. `send` and `receive` carry results.
    """

    def __init__(
        self,
        work: Callable[[Task, Heartbeat], Result],
        *,
        num_workers: int,
        timeout_s: float = float("inf"),
        ahead: int = 2,
        name: str = "worker",
        send: Callable[[socket.socket, Any], None] = send_pickle,
        receive: Callable[[socket.socket], Any] = receive_pickle,
    ) -> None:
        self._work, self._num_workers, self._ahead, self._name = work, num_workers, ahead, name
        self._send, self._receive = send, receive
        self.timeout_s = timeout_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD])
        self._board = self._context.RawArray("q", [_IDLE] * (num_workers * _FIELDS))
        self._workers: dict[int, _Worker] = {}
        self._tasks: dict[int, Task] = {}  # by number: taken up, and their results not yet given
        self._waiting: deque[int] = deque()  # tasks that no worker has
        self._results: dict[int, Result | Exception] = {}
        self._num_lost = 0

    def run(
        self, tasks: Iterable[Task], on_lost: Callable[[Lost, Task | None], Result | None], *, in_order: bool = True
    ) -> Iterator[Result]:
        """The results, in the order of the tasks or as they come; an exception of the work is raised in its place.

        `on_lost` gets the task that ended its worker (None: none did); it may give its result, or raise. With None the
        task is done again.
        """
        numbered = enumerate(tasks)
        try:
            for number in range(self._num_workers):
                self._workers[number] = self._start(number)
            self._hand_out(numbered)
            number = 0
            while self._tasks:
                if not in_order:
                    number = next(iter(self._results), -1)
                if number not in self._results:
                    self._wait(on_lost)
                    self._hand_out(numbered)
                    continue
                result = self._results.pop(number)
                del self._tasks[number]
                number += 1
                if isinstance(result, Exception):
                    raise result
                self._hand_out(numbered)
                yield result
        finally:
            _end_workers(self._workers.values())

    def _start(self, number: int) -> _Worker:
        self._board[number * _FIELDS : (number + 1) * _FIELDS] = [_STARTING, NO_NOTE, _now_us()]
        # Closed one by one: what the other side inherits must not keep a dead worker's connection open.
        get, put = self._context.Pipe(duplex=False)
        ours, theirs = socket.socketpair()
        with _ctrl_c_ignored():
            forkserver.ensure_running()
        process = self._context.Process(
            target=_serve,
            args=(self._work, self._send, get, theirs, self._board, number),
            daemon=True,
            name=f"{self._name}-{number}",
        )
        process.start()
        get.close()
        theirs.close()
        return _Worker(number, process, put, ours)

    def _hand_out(self, numbered: Iterator[tuple[int, Task]]) -> None:
        """Take up new tasks while there is room, and give every free worker something to do."""
        while len(self._tasks) < self._num_workers * self._ahead:
            number, task = next(numbered, (None, None))
            if number is None:
                break
            self._tasks[number] = task  # type: ignore[assignment]
            self._waiting.append(number)
        while self._waiting:
            worker = min(self._workers.values(), key=lambda worker: len(worker.given))
            if len(worker.given) >= self._ahead:
                return
            if not worker.given:
                worker.touched_us = _now_us()
            number = self._waiting.popleft()
            worker.given.append(number)
            # Of a dead worker the results end, too; the task is then given to its successor.
            with suppress(BrokenPipeError, ConnectionResetError):
                worker.tasks.send((number, self._tasks[number]))

    def _wait(self, on_lost: Callable[[Lost, Task | None], Result | None]) -> None:
        """Take in results, or replace workers that died or are late."""
        by_socket = {worker.results: worker for worker in self._workers.values()}
        for ready in connection.wait(list(by_socket), timeout=min(_POLL_S, self.timeout_s)):
            assert isinstance(ready, socket.socket)
            worker = by_socket[ready]
            try:
                number, result = self._receive(worker.results)
            except (EOFError, ConnectionResetError):
                self._replace(worker, on_lost)
                continue
            worker.given.remove(number)
            worker.touched_us = _now_us()
            self._results[number] = result
            self._num_lost = 0
        for worker in [*self._workers.values()]:
            task, _, since_us = self._board[worker.number * _FIELDS : (worker.number + 1) * _FIELDS]
            limit_s = max(self.timeout_s, _START_S) if task == _STARTING else self.timeout_s
            if worker.given and _now_us() - max(since_us, worker.touched_us) > limit_s * 1e6:
                self._replace(worker, on_lost, f"gave no answer for {limit_s:g} s")

    def _replace(
        self, worker: _Worker, on_lost: Callable[[Lost, Task | None], Result | None], what: str | None = None
    ) -> None:
        del self._workers[worker.number]
        ending = _end_workers([worker], at_once=what is not None)
        at, note, _ = self._board[worker.number * _FIELDS : (worker.number + 1) * _FIELDS]
        self._num_lost += 1
        lost = Lost(worker.number, note, what or f"died ({ending})", at != _STARTING, self._num_lost)
        # One that died after it had answered is at no task.
        result = on_lost(lost, self._tasks[at] if at in worker.given else None)
        if result is not None:
            worker.given.remove(at)
            self._results[at] = result
            self._num_lost = 0
        # The oldest is waited for first.
        self._waiting = deque(sorted([*self._waiting, *worker.given]))
        self._workers[worker.number] = self._start(worker.number)


@dataclass
class _Worker:
    """The parent's side of a process; `touched_us` is when it last answered or was given work after a pause."""

    number: int
    process: BaseProcess
    tasks: connection.Connection[Any, Any]
    results: socket.socket
    given: deque[int] = field(default_factory=deque)
    touched_us: int = 0


def _now_us() -> int:
    # Counts from the start of the system, so all processes agree on it.
    return time.monotonic_ns() // 1000


def _end_workers(workers: Iterable[_Worker], *, at_once: bool = False) -> str:
    """Close their connections and wait, then SIGKILL, which also ends a stopped process; how the last one ended."""
    workers, ending = list(workers), ""
    for worker in workers:
        worker.tasks.close()
        worker.results.close()
    deadline_s = time.monotonic() + (0 if at_once else _END_S)
    for worker in workers:
        worker.process.join(max(0.0, deadline_s - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        code = worker.process.exitcode
        ending = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        worker.process.close()
    return ending


def _serve(
    work: Callable[[Any, Heartbeat], Any],
    send: Callable[[socket.socket, Any], None],
    tasks: connection.Connection[Any, Any],
    results: socket.socket,
    board: Any,
    number: int,
) -> None:
    """Worker main loop, until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    _end_with_parent()
    first = number * _FIELDS

    def beat(task: int, note: int) -> None:
        board[first : first + _FIELDS] = [task, note, _now_us()]

    beat(_IDLE, NO_NOTE)
    try:
        while True:
            task_number, task = tasks.recv()
            beat(task_number, NO_NOTE)
            try:
                result = work(task, partial(beat, task_number))
            except Exception as error:
                result = _portable(error)
            send(results, (task_number, result))
            beat(_IDLE, NO_NOTE)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _portable(error: Exception) -> Exception:
    """An error that can be pickled; an unexpected one carries its traceback as a note."""
    if not isinstance(error, FrameloomError):
        error.add_note("in a worker process:\n" + traceback.format_exc())
    try:
        ForkingPickler.dumps(error)
        copy.copy(error)  # made anew from its arguments, as the other side will
    except Exception:
        kind = FrameloomError if isinstance(error, FrameloomError) else RuntimeError
        return kind(str(error) if kind is FrameloomError else traceback.format_exc())
    return error


def _end_with_parent() -> None:
    """End this process when its parent is gone, also after a SIGKILL and also in the middle of a task."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """The fork server inherits it, and workers from it: Ctrl-C reaches all of them, and the parent decides."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it gets Ctrl-C
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
