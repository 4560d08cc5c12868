"""Data loader: micro-batches in the order of their plan, read ahead by worker processes.

Workers only change when a batch is read, never what is in it: a request says everything. One pool serves all epochs of
a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from frameloom.data.loading.batch import Batch, BatchReader, BatchRequest, no_watch
from frameloom.data.loading.workers import WorkerPool, guard
from frameloom.data.order.plan import BatchPlan


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
