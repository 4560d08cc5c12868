"""Several processes that share a list of work: none starts before all have checked, and the first gets all results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from frameloom.core.ranks import Ranks

# A share may take hours longer than another; a process that dies is noticed by torchrun, not by a timeout.
_PATIENCE = timedelta(days=7)


class RankGroup:
    """Make one with `join_ranks`; alone, all of it is immediate."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def wait(self) -> None:
        """Return when all ranks have come here."""
        if self.ranks.num_ranks > 1:
            dist.barrier()

    def broadcast(self, value: Any) -> Any:
        """What the first rank has, on all of them."""
        if self.ranks.num_ranks == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, items: Sequence[Any]) -> list[Any] | None:
        """The items of all ranks, by rank, on the first one; None on the others."""
        if self.ranks.num_ranks == 1:
            return list(items)
        found: list[list[Any]] | None = [[] for _ in range(self.ranks.num_ranks)] if self.ranks.is_first else None
        dist.gather_object(list(items), found)
        return None if found is None else [item for part in found for item in part]


@contextmanager
def join_ranks(ranks: Ranks) -> Iterator[RankGroup]:
    if ranks.num_ranks == 1:
        yield RankGroup(ranks)
        return
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield RankGroup(ranks)
    finally:
        dist.destroy_process_group()
