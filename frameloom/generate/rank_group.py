"""Several processes that share a list of work: none starts before all have checked, and the first gets all results.

Neighbours may form groups that make one clip together (`sequence`); then the groups share the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from frameloom.core.errors import ConfigError, SilentStop
from frameloom.core.ranks import Ranks
from frameloom.core.voice import hushed, speak_once
from frameloom.models.layers.sequence_parallel import ALONE, SequenceGroup, divide_ranks

# A share may take hours longer than another; a process that dies is noticed by torchrun, not by a timeout.
_PATIENCE = timedelta(days=7)


class RankGroup:
    """Make one with `join_ranks`; alone, all of it is immediate."""

    def __init__(self, ranks: Ranks, sequence: SequenceGroup = ALONE) -> None:
        self.ranks, self.sequence = ranks, sequence

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
def join_ranks(ranks: Ranks, *, sequence: int = 1) -> Iterator[RankGroup]:
    """All processes of this call, in groups of `sequence`; ConfigError when they cannot be divided so."""
    try:
        check_groups(ranks.num_ranks, sequence)
    except ConfigError as error:
        if ranks.local_rank == 0:
            raise
        # All processes of a host find the same; one of them tells it.
        raise SilentStop(error.exit_code) from error
    if ranks.num_ranks == 1:
        yield RankGroup(ranks)
        return
    on_gpu = sequence > 1 and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(ranks.local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_PATIENCE)
    try:
        store = dist.distributed_c10d._get_default_store()
        with hushed(ranks.rank), speak_once(ranks.rank, store):
            yield RankGroup(ranks, divide_ranks(sequence))
    finally:
        dist.destroy_process_group()


def check_groups(num_ranks: int, sequence: int) -> None:
    """ConfigError with the arithmetic when so many processes do not make whole groups."""
    if num_ranks == 1 and sequence > 1:
        raise ConfigError(
            f"--sequence {sequence}: {sequence} processes make a clip together, but this is one; start them: "
            f"torchrun --nproc-per-node {sequence} -m frameloom sample ..."
        )
    if num_ranks % sequence:
        below = num_ranks // sequence * sequence
        fitting = f"{below} or {below + sequence}" if below else str(sequence)
        raise ConfigError(
            f"--sequence {sequence}: {num_ranks} processes / {sequence} leaves a group of {num_ranks % sequence}; "
            f"start {fitting} processes, or choose a divisor of {num_ranks}"
        )
