"""What ranks read of a plan, in the way of a training run: steps are shared out and become requests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice

from frameloom.data.loading.batch import Batch, BatchRequest
from frameloom.data.loading.loader import read_requests, request_at
from frameloom.data.loading.reader import BatchReader
from frameloom.data.order.plan import BatchPlan
from frameloom.data.order.rank_assignment import RankAssignment, plan_steps


def make_requests(plan: BatchPlan, *, position: int = 0, rank: int = 0, num_ranks: int = 1) -> Iterator[BatchRequest]:
    """Those of one rank from micro-batch `position` on, in steps of one micro-batch for each rank."""
    steps = plan_steps(
        lambda _: plan, RankAssignment(rank, num_ranks, num_ranks), epoch=plan.epoch, microbatch=position
    )
    num_steps = max(0, -(-(plan.num_microbatches - position) // num_ranks))
    for step in islice(steps, num_steps):
        yield from (request_at(plan, index) for index, is_filler in step.of_rank() if not is_filler)


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
        for step in plan_steps(plan_of_epoch, RankAssignment(), epoch=epoch, microbatch=position):
            plans[step.epoch] = step.plan
            yield request_at(step.plan, step.first)

    for batch in read_requests(requests(), reader, **kwargs):
        yield plans[batch.epoch], batch
