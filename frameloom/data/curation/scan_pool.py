"""A process pool for work on many files, where any file may hang or kill its process.

Each process gets a few files and answers one by one. A process that dies or is silent for too long is replaced, the
file it was at gets a record that says so, and the rest of its files go on. Order is not kept.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from frameloom.core.errors import RunError

_POLL_S = 0.5
_START_S = 300.0  # importing torch from a cold network disk
_CHUNK = 16
# Handed out before the answers to the first ones are in, so that a process never waits for us.
_AHEAD = 2


@dataclass(frozen=True)
class Job:
    """One file below the root; `size` and `mtime_ns` are those of an earlier result, which is good while they hold.

    `member` is (name, first byte, number of bytes) inside the tar that `path`, up to the name, leads to.
    """

    path: str
    size: int | None = None
    mtime_ns: int | None = None
    is_audited: bool = False
    member: tuple[str, int, int] | None = None


# What is found out about a file, by column name.
Record = dict[str, Any]
Work = Callable[[Job], Record]
Blame = Callable[[Job, str], Record]


def run_jobs(work: Work, jobs: Iterable[Job], *, workers: int, timeout_s: float, blame: Blame) -> Iterator[Record]:
    """The results in the order they come in; without workers, in this process and without a time limit.

    Both functions must survive pickling; `blame` makes the result of a file that gave none from what happened.
    """
    if workers == 0:
        yield from (_work_on(work, job, blame) for job in jobs)
        return
    pool = _Pool(work, iter(jobs), workers, timeout_s, blame)
    try:
        yield from pool.results()
    finally:
        pool.close()


@dataclass
class _Worker:
    process: BaseProcess
    pipe: connection.Connection
    heard_s: float
    is_ready: bool = False
    waiting: deque[Job] = field(default_factory=deque)


class _Pool:
    def __init__(self, work: Work, jobs: Iterator[Job], workers: int, timeout_s: float, blame: Blame) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # polars must not be among them: it starts threads when imported, which a fork would lose.
        self._context.set_forkserver_preload(["frameloom.data.curation.inspection"])
        self._work = work
        self._jobs = jobs
        self._timeout_s = timeout_s
        self._blame = blame
        self._again: deque[Job] = deque()
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._workers.append(self._start())

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(self._work, self._blame, theirs), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, time.monotonic())

    def results(self) -> Iterator[Record]:
        for worker in self._workers:
            self._feed(worker)
        while any(worker.waiting for worker in self._workers):
            ready = connection.wait([worker.pipe for worker in self._workers], timeout=_POLL_S)
            for number, worker in enumerate(self._workers):
                if worker.pipe in ready:
                    yield from self._receive(number, worker)
                elif worker.waiting and self._is_late(worker):
                    yield self._replace(number, worker, f"gave no answer for {self._timeout_s:g} s")

    def _is_late(self, worker: _Worker) -> bool:
        silent_s = time.monotonic() - worker.heard_s
        if not worker.is_ready and silent_s > _START_S:
            raise RunError(f"a worker process did not start within {_START_S:g} s; try fewer --workers")
        return worker.is_ready and silent_s > self._timeout_s

    def _feed(self, worker: _Worker) -> None:
        if len(worker.waiting) > (_AHEAD - 1) * _CHUNK:
            return
        chunk = [self._again.popleft() for _ in range(min(len(self._again), _CHUNK))]
        chunk += islice(self._jobs, _CHUNK - len(chunk))
        if not chunk:
            return
        if not worker.waiting:
            worker.heard_s = time.monotonic()
        worker.waiting.extend(chunk)
        with suppress(BrokenPipeError):  # it died; reading its pipe tells us next
            worker.pipe.send(chunk)

    def _receive(self, number: int, worker: _Worker) -> Iterator[Record]:
        try:
            while True:
                answer = worker.pipe.recv()
                worker.heard_s = time.monotonic()
                if worker.is_ready:
                    worker.waiting.popleft()
                    yield answer
                worker.is_ready = True
                if not worker.pipe.poll():
                    break
        except (EOFError, ConnectionResetError):
            worker.process.join()
            if not worker.is_ready:
                raise RunError(
                    f"a worker process ended while starting (exit code {worker.process.exitcode}); look for a lack of "
                    "memory or try fewer --workers"
                ) from None
            yield self._replace(number, worker, f"killed its reader ({_spell_exit(worker.process.exitcode)})")
            return
        self._feed(worker)

    def _replace(self, number: int, worker: _Worker, what: str) -> Record:
        _end(worker)
        guilty = worker.waiting.popleft()
        self._again.extend(worker.waiting)
        self._workers[number] = self._start()
        self._feed(self._workers[number])
        return self._blame(guilty, what)

    def close(self) -> None:
        for worker in self._workers:
            _end(worker)


def _end(worker: _Worker) -> None:
    worker.process.kill()  # a stopped or hanging process would not hear a polite request
    worker.process.join()
    worker.pipe.close()


def _spell_exit(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _work_on(work: Work, job: Job, blame: Blame) -> Record:
    """An unexpected exception at one file becomes its record; it must not end the work on a million others."""
    try:
        return work(job)
    except Exception as error:
        return blame(job, f"made its reader fail ({type(error).__name__}: {error})")


def _serve(work: Work, blame: Blame, pipe: connection.Connection) -> None:
    """Worker main loop, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    _die_with_parent()
    pipe.send("ready")
    while True:
        try:
            chunk = pipe.recv()
        except EOFError:
            return
        for job in chunk:
            pipe.send(_work_on(work, job, blame))


def _die_with_parent() -> None:
    """End this process when the scanning one is gone, also after a SIGKILL and also in the middle of a file."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
