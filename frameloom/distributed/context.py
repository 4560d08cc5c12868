"""The ranks of a job and what they exchange: tensors and objects.

All ranks make the same calls in the same order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from frameloom.core.errors import FrameloomError, PeerFailed
from frameloom.distributed.failures import quiet_ranks, report_once
from frameloom.distributed.ranks import Ranks

Obj = TypeVar("Obj")


class Collective:
    """All ranks of a process group; without a group one process alone, which exchanges nothing.

    Two threads of a process must not share a group: their messages would mix.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        if self.size > 1:
            dist.barrier(self._group)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, obj: Obj) -> list[Obj]:
        """The objects of all ranks, in order of rank."""
        found: list[Any] = [obj] * self.size
        if self.size > 1:
            dist.all_gather_object(found, obj, group=self._group)
        return found

    def gather(self, obj: Obj) -> list[Obj]:
        """The objects of all ranks, in order of rank, on rank 0; an empty list elsewhere."""
        found: list[Any] | None = [obj] * self.size if self.is_first else None
        if self.size > 1:
            dist.gather_object(obj, found, dst=0, group=self._group)
        return found or []

    def broadcast(self, obj: Any) -> Any:
        """The object of rank 0; those of the other ranks do not count."""
        found = [obj if self.is_first else None]
        if self.size > 1:
            dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0]

    def scatter(self, objs: Sequence[Obj] | None) -> Obj:
        """This rank's item of the list that rank 0 has; the others pass None."""
        found: list[Any] = [objs[0] if objs else None]
        if self.size > 1:
            dist.scatter_object_list(found, list(objs) if objs is not None else None, src=0, group=self._group)
        obj: Obj = found[0]
        return obj

    def run_on_rank0(self, work: Callable[[], Obj], *, error: Callable[[str], Exception] | None = None) -> Obj:
        """The result of `work`, which rank 0 alone runs, on all ranks.

        If it fails, rank 0 raises what `work` raised. The other ranks raise PeerFailed with its exit code, or `error`
        with its message.
        """
        result: Any = None
        raised: BaseException | None = None
        failure: tuple[int, str] | None = None
        if self.is_first:
            try:
                result = work()
            except BaseException as found:
                raised = found
                failure = found.exit_code if isinstance(found, FrameloomError) else 1, format_error(found)
        result, failure = self.broadcast((result, failure))
        if raised is not None:
            raise raised
        if failure is not None:
            raise PeerFailed(failure[0]) if error is None else error(failure[1])
        answer: Obj = result
        return answer


def format_error(error: BaseException) -> str:
    """An error in one line; the kind is named where the message was not written for people."""
    if isinstance(error, (FrameloomError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


@contextmanager
def process_group(
    ranks: Ranks, *, on_gpu: bool, timeout: timedelta, keep_warnings: Sequence[logging.Logger] = ()
) -> Iterator[Collective]:
    """All ranks of the job, connected while the block runs; on failure exactly one of them reports the error.

    `keep_warnings` are loggers whose warnings are shown from every rank.
    """
    if on_gpu:
        torch.cuda.set_device(ranks.local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timeout)
    try:
        store = dist.distributed_c10d._get_default_store()
        with quiet_ranks(ranks.rank, keep_warnings), report_once(ranks.rank, store):
            yield Collective(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def build_mesh(device_type: str, **axes: int) -> DeviceMesh:
    """All ranks as a mesh of named axes, the last one of neighbouring ranks."""
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def join_host() -> dist.ProcessGroup:
    """The ranks of this machine, by LOCAL_WORLD_SIZE of torchrun; all ranks where that is not set."""
    num_ranks = dist.get_world_size()
    size = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if size >= num_ranks or num_ranks % size:
        group = dist.group.WORLD
    else:
        hosts = [list(range(first, first + size)) for first in range(0, num_ranks, size)]
        group, _ = dist.new_subgroups_by_enumeration(hosts)  # type: ignore[no-untyped-call]
    assert group is not None
    return group
