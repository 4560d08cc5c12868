"""Data loader: micro-batches in the order of their plan, read ahead by worker processes.

Workers only change when a batch is read, never what is in it: a request says everything. A worker reports each file
before it opens it. One that dies, or has the same file open for longer than the limit, is replaced, and its
micro-batches are read again. A clip at which this happens twice is quarantined: it counts as unreadable and is replaced
like any other bad clip.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from frameloom.core.errors import RunError
from frameloom.core.logging import get_logger
from frameloom.core.process_pool import Heartbeat, Lost, ProcessPool
from frameloom.data.loading.batch import NO_ROW, Batch, BatchRequest, OnOpen, ignore_open
from frameloom.data.loading.reader import BatchReader
from frameloom.data.loading.shm_transport import receive_object, send_object
from frameloom.data.media.decode import FatalClip
from frameloom.data.order.plan import BatchPlan

log = get_logger(__name__)
"""All ranks show its warnings: each has its own workers."""

_MAX_STRIKES = 2
_NUM_SHOWN = 8
_ADVICE = "resume the run; if it comes again there, look for a lack of memory or take the file out of the manifest"


def read_requests(
    requests: Iterable[BatchRequest],
    reader: BatchReader,
    *,
    workers: int = 0,
    timeout_s: float | None = None,
    prefetch: int = 2,
    quarantine: Mapping[int, str] | None = None,
) -> Iterator[Batch]:
    """Batches in the order of `requests`; without workers they are read in this process and there is no deadline.

    A worker that dies, or has a clip open for longer than `timeout_s` (None: that of the recipe), is replaced. A clip
    at which this happens twice is treated as unreadable; those of `quarantine` (row and reason) are not opened at all.
    """
    if workers == 0:
        on_open = refuse_quarantined(quarantine, ignore_open) if quarantine else ignore_open
        yield from (reader.read(request, on_open) for request in requests)
        return
    pool: ProcessPool[_Task, Batch] = ProcessPool(
        partial(_read_task, reader),
        num_workers=workers,
        timeout_s=timeout_s or reader.data.timeout_s,
        ahead=prefetch,
        name="loader",
        send=send_object,
        receive=receive_object,
    )
    blame = _Blame(reader, workers, dict(quarantine or {}))
    yield from pool.run(((request, blame.quarantine) for request in requests), blame)


def request_at(plan: BatchPlan, index: int) -> BatchRequest:
    """One micro-batch of a plan."""
    return BatchRequest(
        plan.epoch,
        index,
        int(plan.buckets[index]),
        plan.rows(index),
        plan.sample_indices(index),
        plan.fallback_rows(index),
    )


def iterate_batches(plan: BatchPlan, reader: BatchReader) -> Iterator[Batch]:
    """One epoch in plan order, read in this process."""
    return read_requests((request_at(plan, index) for index in range(plan.num_microbatches)), reader)


def refuse_quarantined(quarantine: Mapping[int, str], then: OnOpen) -> OnOpen:
    def on_open(row: int) -> None:
        then(row)
        if row in quarantine:
            raise FatalClip(quarantine[row])

    return on_open


# The quarantine is that of the time when a request is handed out.
_Task = tuple[BatchRequest, Mapping[int, str]]


def _read_task(reader: BatchReader, task: _Task, heartbeat: Heartbeat) -> Batch:
    """What a worker does."""
    request, quarantine = task
    return reader.read(request, refuse_quarantined(quarantine, heartbeat))


@dataclass
class _Blame:
    """Counts what lost workers had open; RunError when it is not one clip's fault."""

    reader: BatchReader
    num_workers: int
    quarantine: dict[int, str]
    strikes: Counter[tuple[str, int, int]] = field(default_factory=Counter)

    def __call__(self, lost: Lost, task: _Task | None) -> None:
        who = f"loader worker {lost.worker} {lost.what}"
        if task is None or lost.note == NO_ROW:
            log.warning("%s %s; replaced", who, self._locate(lost, task))
            return
        request, row, name = task[0], lost.note, self.reader.name(lost.note)
        where = f"micro-batch {request.index} of epoch {request.epoch}"
        self.strikes["row", 0, row] += 1
        if self.strikes["row", 0, row] < _MAX_STRIKES:
            log.warning("%s at %s (%s); replaced, reading it again", who, name, where)
            return
        self.quarantine[row] = f"{name}: a worker that read it {lost.what}, {_MAX_STRIKES} times; replace the file"
        log.warning("%s at %s (%s) again; the clip is left out", who, name, where)

    def _locate(self, lost: Lost, task: _Task | None) -> str:
        where = "before it read anything"
        if task is not None:
            request = task[0]
            names = ", ".join(self.reader.name(int(row)) for row in request.rows[:_NUM_SHOWN])
            where = f"in micro-batch {request.index} of epoch {request.epoch}, between files ({names})"
            self.strikes["request", request.epoch, request.index] += 1
            if self.strikes["request", request.epoch, request.index] >= _MAX_STRIKES:
                raise RunError(f"a loader worker {lost.what} {where}, {_MAX_STRIKES} times; {_ADVICE}")
        if lost.in_a_row > _MAX_STRIKES + self.num_workers:
            raise RunError(f"{lost.in_a_row} loader workers in a row died or hung, the last {where}; {_ADVICE}")
        return where
