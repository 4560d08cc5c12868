"""Data loader: micro-batches in the order of their plan, read ahead by worker processes.

Workers only change when a batch is read, never what is in it: a request says everything. Each worker writes to a shared
board which clip it has open and since when. One that dies, or has the same clip open for longer than the limit, is
killed and replaced, and its micro-batches are read again. A clip at which this happens twice is quarantined: it counts
as unreadable and is replaced like any other bad clip. Processes are started by a fork server: a plain fork would copy
locks that threads of torch, polars or the decoder may hold at that moment, and a fresh interpreter each would import
torch anew.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

import torch

from frameloom.core.errors import FrameloomError, RunError
from frameloom.core.logging import get_logger
from frameloom.data.loading.batch import NO_ROW, Batch, BatchReader, BatchRequest, Watch, no_watch
from frameloom.data.loading.shm_transport import receive_parcel, send_parcel
from frameloom.data.media.decode import FatalClip
from frameloom.data.order.plan import BatchPlan

log = get_logger(__name__)
"""Every rank of a run shows its warnings: a worker that is replaced is that rank's own."""

_POLL_S = 1.0
_START_S = 120.0  # a new process imports torch, on a busy machine from a cold disk
_END_S = 2.0
_MAX_STRIKES = 2
_NUM_SHOWN = 8
_STARTING, _IDLE = -2, -1
_FIELDS = 3  # of a worker on the board: job, row, since when in microseconds
_ADVICE = "resume the run; if it comes again there, look for a lack of memory or take the file out of the manifest"

Result = Batch | Exception


def read_requests(
    requests: Iterable[BatchRequest],
    reader: BatchReader,
    *,
    workers: int = 0,
    timeout_s: float = 300.0,
    prefetch: int = 2,
    quarantine: Mapping[int, str] | None = None,
) -> Iterator[Batch]:
    """Batches in the order of `requests`; without workers they are read in this process and there is no deadline.

    A worker that dies, or has a clip open for longer than `timeout_s`, is replaced; a clip at which this happens twice
    is treated as unreadable, and so are those of `quarantine` (row and reason), which are not opened at all.
    """
    if workers == 0:
        watch = guard(quarantine, no_watch) if quarantine else no_watch
        yield from (reader.read(request, watch) for request in requests)
        return
    pool = WorkerPool(
        requests, reader, num_workers=workers, timeout_s=timeout_s, prefetch=prefetch, quarantine=quarantine
    )
    yield from pool.batches()


def request_at(plan: BatchPlan, index: int) -> BatchRequest:
    """One micro-batch of a plan."""
    return BatchRequest(
        plan.epoch, index, int(plan.buckets[index]), plan.rows(index), plan.ordinals(index), plan.spares(index)
    )


def iterate_batches(plan: BatchPlan, reader: BatchReader) -> Iterator[Batch]:
    """One epoch in plan order, read in this process."""
    return read_requests((request_at(plan, index) for index in range(plan.num_microbatches)), reader)


def guard(quarantine: Mapping[int, str], then: Watch) -> Watch:
    """A watch that refuses quarantined rows."""

    def watch(row: int) -> None:
        then(row)
        if row in quarantine:
            raise FatalClip(quarantine[row])

    return watch


class WorkerPool:
    """Reads requests with `num_workers` processes and gives the batches in the order of the requests."""

    def __init__(
        self,
        requests: Iterable[BatchRequest],
        reader: BatchReader,
        *,
        num_workers: int,
        timeout_s: float,
        prefetch: int,
        quarantine: Mapping[int, str] | None = None,
    ) -> None:
        self._requests = iter(requests)
        self._reader = reader
        self._timeout_s = timeout_s
        self._prefetch = prefetch
        self._num_workers = num_workers
        self._context = multiprocessing.get_context("forkserver")
        # polars must not be among them: it starts threads when imported, which a fork would lose.
        self._context.set_forkserver_preload(
            ["torch.utils.data", "av", "PIL.Image", "frameloom.core.logging", "frameloom.config.schema.recipe"]
        )
        self._board = self._context.RawArray("q", [_IDLE] * (num_workers * _FIELDS))
        self._workers: dict[int, _Worker] = {}
        self._asked: dict[int, BatchRequest] = {}  # by job: a running number
        self._waiting: deque[int] = deque()  # jobs that no worker has
        self._results: dict[int, Result] = {}
        self._num_asked = 0
        self._quarantine = dict(quarantine or {})
        self._strikes: Counter[tuple[str, int, int]] = Counter()
        self._num_barren = 0  # workers lost since something came of it

    def batches(self) -> Iterator[Batch]:
        try:
            for number in range(self._num_workers):
                self._workers[number] = self._start(number)
            self._hand_out()
            job = 0
            while job in self._asked:
                result = self._wait_for(job)
                del self._asked[job]
                job += 1
                if isinstance(result, Exception):
                    raise result
                self._hand_out()
                yield result
        finally:
            _end_workers(self._workers.values())

    def _start(self, number: int) -> _Worker:
        self._board[number * _FIELDS : (number + 1) * _FIELDS] = [_STARTING, NO_ROW, _now_us()]
        # Closed one by one: what the other side inherits must not keep a dead worker's connection open.
        get, put = self._context.Pipe(duplex=False)
        ours, theirs = socket.socketpair()
        process = self._context.Process(
            target=_serve, args=(self._reader, get, theirs, self._board, number), daemon=True, name=f"loader-{number}"
        )
        process.start()
        get.close()
        theirs.close()
        return _Worker(number, process, put, ours)

    def _hand_out(self) -> None:
        """Take new requests while there is room, and give every free worker something to do."""
        while len(self._asked) < self._num_workers * self._prefetch:
            request = next(self._requests, None)
            if request is None:
                break
            self._asked[self._num_asked] = request
            self._waiting.append(self._num_asked)
            self._num_asked += 1
        while self._waiting:
            worker = min(self._workers.values(), key=lambda worker: len(worker.jobs))
            if len(worker.jobs) >= self._prefetch:
                return
            self._give(worker, self._waiting.popleft())

    def _give(self, worker: _Worker, job: int) -> None:
        if not worker.jobs:
            worker.touched_us = _now_us()
        worker.jobs.append(job)
        news = dict(list(self._quarantine.items())[worker.num_told :])
        worker.num_told = len(self._quarantine)
        try:
            worker.requests.send((job, self._asked[job], news))
        except (BrokenPipeError, ConnectionResetError):
            return  # dead; found out when its results end, and the job is given to its successor

    def _wait_for(self, job: int) -> Result:
        while job not in self._results:
            by_socket = {worker.results: worker for worker in self._workers.values()}
            for ready in connection.wait(list(by_socket), timeout=min(_POLL_S, self._timeout_s)):
                assert isinstance(ready, socket.socket)
                self._take_result(by_socket[ready])
            for worker in [worker for worker in self._workers.values() if self._is_late(worker)]:
                self._replace(worker, died=False)
            self._hand_out()
        return self._results.pop(job)

    def _take_result(self, worker: _Worker) -> None:
        try:
            job, result = receive_parcel(worker.results)
        except (EOFError, ConnectionResetError):
            self._replace(worker, died=True)
            return
        worker.jobs.remove(job)
        worker.touched_us = _now_us()
        self._results[job] = result
        self._num_barren = 0

    def _read_board(self, worker: _Worker) -> _Note:
        return _Note(*self._board[worker.number * _FIELDS : (worker.number + 1) * _FIELDS])

    def _is_late(self, worker: _Worker) -> bool:
        note = self._read_board(worker)
        limit_s = max(self._timeout_s, _START_S) if note.job == _STARTING else self._timeout_s
        return bool(worker.jobs) and _now_us() - max(note.since_us, worker.touched_us) > limit_s * 1e6

    def _replace(self, worker: _Worker, *, died: bool) -> None:
        del self._workers[worker.number]
        _end_workers([worker], at_once=True)
        note = self._read_board(worker)
        self._num_barren += 1
        what = "died" if died else f"gave nothing for {self._timeout_s:g} s"
        self._blame(worker, note, what)
        # The oldest is waited for first.
        self._waiting = deque(sorted([*self._waiting, *worker.jobs]))
        self._workers[worker.number] = self._start(worker.number)

    def _blame(self, worker: _Worker, note: _Note, what: str) -> None:
        """Count a strike against what was being read; RunError if it is not one clip's fault."""
        request = self._asked.get(note.job)
        if request is None or note.row == NO_ROW:
            self._blame_nobody(worker, request, what)
            return
        name = self._reader.name(note.row)
        where = f"micro-batch {request.index} of epoch {request.epoch}"
        self._strikes["row", 0, note.row] += 1
        if self._strikes["row", 0, note.row] < _MAX_STRIKES:
            log.warning("loader worker %d %s at %s (%s); replaced, reading it again", worker.number, what, name, where)
            return
        self._num_barren = 0
        self._quarantine[note.row] = f"{name}: a worker that read it {what}, {_MAX_STRIKES} times; replace the file"
        log.warning("loader worker %d %s at %s (%s) again; the clip is left out", worker.number, what, name, where)

    def _blame_nobody(self, worker: _Worker, request: BatchRequest | None, what: str) -> None:
        where = "before it read anything"
        if request is not None:
            names = ", ".join(self._reader.name(int(row)) for row in request.rows[:_NUM_SHOWN])
            where = f"in micro-batch {request.index} of epoch {request.epoch}, between files ({names})"
            self._strikes["request", request.epoch, request.index] += 1
            if self._strikes["request", request.epoch, request.index] >= _MAX_STRIKES:
                raise RunError(f"a loader worker {what} {where}, {_MAX_STRIKES} times; {_ADVICE}")
        if self._num_barren > _MAX_STRIKES + self._num_workers:
            raise RunError(f"{self._num_barren} loader workers in a row died or hung, the last {where}; {_ADVICE}")
        log.warning("loader worker %d %s %s; replaced", worker.number, what, where)


class _Note(NamedTuple):
    """What a worker wrote on the board."""

    job: int
    row: int
    since_us: int


@dataclass
class _Worker:
    """Our side of one process; `touched_us` is when it last gave something or was given work after a pause."""

    number: int
    process: ForkServerProcess
    requests: connection.Connection[Any, Any]
    results: socket.socket
    jobs: deque[int] = field(default_factory=deque)
    touched_us: int = 0
    num_told: int = 0


def _now_us() -> int:
    # Counts from the start of the system, so all processes agree on it.
    return time.monotonic_ns() // 1000


def _end_workers(workers: Iterable[_Worker], *, at_once: bool = False) -> None:
    """Close their connections and wait, then SIGKILL, which also ends a stopped process."""
    workers = list(workers)
    for worker in workers:
        worker.requests.close()
        worker.results.close()
    deadline_s = time.monotonic() + (0 if at_once else _END_S)
    for worker in workers:
        worker.process.join(max(0.0, deadline_s - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.process.close()


def _serve(
    reader: BatchReader, requests: connection.Connection[Any, Any], results: socket.socket, board: Any, number: int
) -> None:
    """Worker main loop, until the trainer closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the trainer decides
    torch.set_num_threads(1)
    _die_with_parent()
    first = number * _FIELDS
    quarantine: dict[int, str] = {}

    def note(job: int, row: int) -> None:
        board[first : first + _FIELDS] = [job, row, _now_us()]

    note(_IDLE, NO_ROW)
    try:
        while True:
            job, request, news = requests.recv()
            quarantine.update(news)
            note(job, NO_ROW)
            watch = guard(quarantine, partial(note, job))
            send_parcel(results, (job, _read(reader, request, watch)))
            note(_IDLE, NO_ROW)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _read(reader: BatchReader, request: BatchRequest, watch: Watch) -> Result:
    try:
        return reader.read(request, watch)
    except Exception as error:
        return _portable(error)


def _portable(error: Exception) -> Exception:
    """An error that can be pickled; an unexpected one carries its traceback as a note."""
    if not isinstance(error, FrameloomError):
        error.add_note("in a loader worker:\n" + traceback.format_exc())
    try:
        pickle.dumps(error)
        copy.copy(error)  # made anew from its arguments, as the other side will
    except Exception:
        kind = FrameloomError if isinstance(error, FrameloomError) else RuntimeError
        return kind(str(error) if kind is FrameloomError else traceback.format_exc())
    return error


def _die_with_parent() -> None:
    """End this worker when the training process is gone, also after a SIGKILL."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def wait() -> None:
        connection.wait([trainer.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
