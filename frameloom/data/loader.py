"""Micro-batches in the order of their plan, read ahead by worker processes.

Workers only change when a batch is read, never what is in it: a request says everything. Processes are started by a
fork server: a plain fork would copy locks that threads of torch, polars or the decoder may hold at that moment, and
a fresh interpreter per worker would import torch anew. One pool serves all epochs of a run.
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
from multiprocessing import connection
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from frameloom.core.errors import DataError, FrameloomError, RunError
from frameloom.data.batch import Batch, BatchReader, BatchRequest
from frameloom.data.plan import BatchPlan

_POLL_S = 1.0
_IDLE = -1
_NUM_SHOWN = 8
_FIELDS = 4  # of a worker on the board: process id, epoch, micro-batch, row


def make_requests(plan: BatchPlan, *, position: int = 0, rank: int = 0, num_ranks: int = 1) -> Iterator[BatchRequest]:
    """Micro-batches from `position` on; with several ranks, those whose index in the epoch is `rank` modulo theirs."""
    first = position + (rank - position) % num_ranks
    for index in range(first, plan.num_microbatches, num_ranks):
        yield BatchRequest(plan.epoch, index, int(plan.buckets[index]), plan.rows(index), plan.ordinals(index))


def iterate_batches(
    plan: BatchPlan,
    reader: BatchReader,
    *,
    position: int = 0,
    rank: int = 0,
    num_ranks: int = 1,
    workers: int = 0,
    timeout_s: float = 300.0,
    prefetch: int = 2,
) -> Iterator[Batch]:
    """The rest of one epoch, in plan order."""
    requests = make_requests(plan, position=position, rank=rank, num_ranks=num_ranks)
    return read_requests(requests, reader, workers=workers, timeout_s=timeout_s, prefetch=prefetch)


def iterate_epochs(
    plan_of_epoch: Callable[[int], BatchPlan],
    reader: BatchReader,
    *,
    epoch: int = 0,
    position: int = 0,
    rank: int = 0,
    num_ranks: int = 1,
    workers: int = 0,
    timeout_s: float = 300.0,
    prefetch: int = 2,
) -> Iterator[tuple[BatchPlan, Batch]]:
    """Epoch after epoch without end, from (`epoch`, `position`) on, with one pool of workers.

    A plan is made when the workers get to it, a few batches before its first batch comes out. With several ranks, an
    epoch whose number of micro-batches is not a multiple of `num_ranks` gives the first ranks one more.
    """
    plans: dict[int, BatchPlan] = {}

    def requests() -> Iterator[BatchRequest]:
        number, start = epoch, position
        while True:
            plan = plans[number] = plan_of_epoch(number)
            if not plan.num_microbatches:
                raise DataError(f"epoch {number} has no batch: no clip fits a bucket; add smaller or shorter ones")
            yield from make_requests(plan, position=start, rank=rank, num_ranks=num_ranks)
            number, start = number + 1, 0

    for batch in read_requests(requests(), reader, workers=workers, timeout_s=timeout_s, prefetch=prefetch):
        for old in [number for number in plans if number < batch.epoch]:
            del plans[old]
        yield plans[batch.epoch], batch


def read_requests(
    requests: Iterable[BatchRequest],
    reader: BatchReader,
    *,
    workers: int = 0,
    timeout_s: float = 300.0,
    prefetch: int = 2,
) -> Iterator[Batch]:
    """Batches in the order of `requests`; without workers they are read in this process and there is no deadline.

    A worker that dies, or gives nothing for `timeout_s`, ends the iteration with a RunError that names its clip.
    """
    if workers == 0:
        yield from (reader.read(request) for request in requests)
        return
    pool = _Pool(requests, reader, workers, timeout_s, prefetch)
    yield from pool.batches()


class _ReadDataset(Dataset[Batch | FrameloomError]):
    """Reads in a worker and writes on the board which clip it is at."""

    def __init__(self, reader: BatchReader, board: Any) -> None:
        self._reader = reader
        self._board = board

    def __getitem__(self, request: BatchRequest) -> Batch | FrameloomError:
        worker = get_worker_info()
        assert worker is not None
        place = worker.id * _FIELDS
        self._board[place : place + _FIELDS] = [os.getpid(), request.epoch, request.index, int(request.rows[0])]

        def watch(row: int) -> None:
            self._board[place + 3] = row

        try:
            return self._reader.read(request, watch)
        except FrameloomError as error:
            # As a value it reaches the person without the traceback that torch would wrap around it.
            return error
        finally:
            self._board[place + 3] = _IDLE


class _Remembered:
    """Hands out requests and keeps those whose batches have not come back."""

    def __init__(self, requests: Iterable[BatchRequest]) -> None:
        self._requests = requests
        self.pending: deque[BatchRequest] = deque()

    def __iter__(self) -> Iterator[BatchRequest]:
        for request in self._requests:
            self.pending.append(request)
            yield request


def _as_is(item: Any) -> Any:
    return item


def _die_with_parent(worker: int) -> None:
    """End this worker when the training process is gone, also after a SIGKILL, which lets nobody clean up.

    torch watches the parent too, but the parent of a worker is the fork server, which lives as long as its workers.
    """
    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def wait() -> None:
        connection.wait([trainer.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class _Pool:
    """A DataLoader over requests, with a shared board on which every worker notes what it is doing."""

    def __init__(
        self, requests: Iterable[BatchRequest], reader: BatchReader, workers: int, timeout_s: float, prefetch: int
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        # polars must not be among them: it starts threads when imported, which a fork would lose.
        context.set_forkserver_preload(["torch.utils.data", "av", "PIL.Image"])
        self._reader = reader
        self._timeout_s = timeout_s
        self._requests = _Remembered(requests)
        self._board = context.RawArray("q", [_IDLE] * (workers * _FIELDS))
        self._loader = DataLoader(
            _ReadDataset(reader, self._board),
            batch_size=None,
            sampler=self._requests,
            collate_fn=_as_is,
            worker_init_fn=_die_with_parent,
            num_workers=workers,
            # Looks for dead workers this often; asking again after it has passed changes nothing.
            timeout=min(timeout_s, _POLL_S),
            prefetch_factor=prefetch,
            multiprocessing_context=context,
            # A generator of its own: making the iterator must not draw from the global one.
            generator=torch.Generator(),
        )

    def batches(self) -> Iterator[Batch]:
        iterator = iter(self._loader)
        try:
            while (item := self._next(iterator)) is not None:
                self._requests.pending.popleft()
                if isinstance(item, FrameloomError):
                    raise item
                yield item
        except Exception:
            # A traceback may keep the iterator, and with it the workers, alive for long.
            self._kill()
            raise
        finally:
            del iterator  # ends the workers now, not when garbage happens to be collected

    def _next(self, iterator: Iterator[Batch | FrameloomError]) -> Batch | FrameloomError | None:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return next(iterator, None)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader"):
                    raise
                is_late = str(error).startswith("DataLoader timed out")
            if not is_late or time.monotonic() >= deadline_s:
                raise RunError(self._blame())

    def _workers(self) -> list[tuple[int, int, int, int]]:
        values = list(self._board)
        return [tuple(values[i : i + _FIELDS]) for i in range(0, len(values), _FIELDS)]

    def _blame(self) -> str:
        waiting = self._requests.pending[0]
        advice = (
            "resume the run; if it comes again there, look for a lack of memory or take the file out of the manifest"
        )
        for number, (pid, epoch, index, row) in enumerate(self._workers()):
            is_dead = pid != _IDLE and not _is_alive(pid)
            if row != _IDLE and (is_dead or (epoch, index) == (waiting.epoch, waiting.index)):
                what = "died" if is_dead else f"gave nothing for {self._timeout_s:g} s"
                clip = self._reader.name(row)
                return f"loader worker {number} {what} at {clip} (micro-batch {index} of epoch {epoch}); {advice}"
        names = ", ".join(self._reader.name(int(row)) for row in waiting.rows[:_NUM_SHOWN])
        where = f"micro-batch {waiting.index} of epoch {waiting.epoch}: {names}"
        return f"the loader's workers died or gave nothing for {self._timeout_s:g} s ({where}); {advice}"

    def _kill(self) -> None:
        """End our workers for good: a stopped process would not hear a polite request."""
        for pid, *_ in self._workers():
            if pid != _IDLE:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
