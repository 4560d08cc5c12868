"""Micro-batches in the order of their plan, read ahead by worker processes.

Workers only change when a batch is read, never what is in it: a request says everything. One pool serves all epochs of
a run; `workers.py` has its processes and what happens when one of them dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from frameloom.core.errors import DataError
from frameloom.data.loading.batch import Batch, BatchReader, BatchRequest, no_watch
from frameloom.data.loading.workers import WorkerPool, guard
from frameloom.data.order.plan import BatchPlan


def make_requests(plan: BatchPlan, *, position: int = 0, rank: int = 0, num_ranks: int = 1) -> Iterator[BatchRequest]:
    """Micro-batches from `position` on; with several ranks, those whose index in the epoch is `rank` modulo theirs."""
    first = position + (rank - position) % num_ranks
    for index in range(first, plan.num_microbatches, num_ranks):
        yield request_at(plan, index)


def request_at(plan: BatchPlan, index: int) -> BatchRequest:
    """One micro-batch of a plan."""
    return BatchRequest(
        plan.epoch, index, int(plan.buckets[index]), plan.rows(index), plan.ordinals(index), plan.spares(index)
    )


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
    quarantine: Mapping[int, str] | None = None,
) -> Iterator[Batch]:
    """The rest of one epoch, in plan order."""
    requests = make_requests(plan, position=position, rank=rank, num_ranks=num_ranks)
    return read_requests(
        requests, reader, workers=workers, timeout_s=timeout_s, prefetch=prefetch, quarantine=quarantine
    )


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
    quarantine: Mapping[int, str] | None = None,
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

    for batch in read_requests(
        requests(), reader, workers=workers, timeout_s=timeout_s, prefetch=prefetch, quarantine=quarantine
    ):
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
