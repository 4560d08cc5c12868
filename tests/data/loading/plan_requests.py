"""What ranks read of a plan, in the way of a training run: steps are shared out and become requests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice

from frameloom.data.loading.batch import Batch, BatchReader, BatchRequest
from frameloom.data.loading.loader import read_requests, request_at
from frameloom.data.order.plan import BatchPlan
from frameloom.data.order.rank_assignment import Shares, iterate_spans


def make_requests(plan: BatchPlan, *, position: int = 0, rank: int = 0, num_ranks: int = 1) -> Iterator[BatchRequest]:
    """Those of one rank from micro-batch `position` on, in steps of one micro-batch for each rank."""
    shares = Shares(rank, num_ranks)
    spans = iterate_spans(lambda _: plan, epoch=plan.epoch, microbatch=position, per_step=num_ranks)
    num_steps = max(0, -(-(plan.num_microbatches - position) // num_ranks))
    for span in islice(spans, num_steps):
        yield from (request_at(plan, pick.index) for pick in shares.pick(span) if not pick.is_filler)


def read_plan(
    plan: BatchPlan, reader: BatchReader, *, position: int = 0, rank: int = 0, num_ranks: int = 1, **kwargs
) -> Iterator[Batch]:
    """The rest of one epoch as one rank reads it; `kwargs` are those of `read_requests`."""
    return read_requests(make_requests(plan, position=position, rank=rank, num_ranks=num_ranks), reader, **kwargs)


def iterate_epochs(
    plan_of_epoch: Callable[[int], BatchPlan], reader: BatchReader, *, epoch: int = 0, position: int = 0, **kwargs
) -> Generator[tuple[BatchPlan, Batch], None, None]:
    """Epoch after epoch without end, with one pool of workers."""
    plans: dict[int, BatchPlan] = {}

    def requests() -> Iterator[BatchRequest]:
        for span in iterate_spans(plan_of_epoch, epoch=epoch, microbatch=position, per_step=1):
            plans[span.epoch] = span.plan
            yield request_at(span.plan, span.first)

    for batch in read_requests(requests(), reader, **kwargs):
        yield plans[batch.epoch], batch
