"""Whole tensors from parts and parts from whole tensors: what a checkpoint that any number of processes can read needs.

An export, and a checkpoint with `train.checkpoint: whole`, is gathered on the first process, one tensor after the
other, so memory there holds all of them and one more. Loading reads only the part of each tensor that a process holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from frameloom.checkpoint.pieces import describe_piece, is_simple
from frameloom.checkpoint.stored import StoredTensors

Tensors = Mapping[str, Mapping[str, Tensor]]


def names_held(tensors: Tensors, group: dist.ProcessGroup) -> list[set[tuple[str, str]]]:
    """(group of tensors, name) of all that each process of `group` has."""
    own = {(kind, name) for kind, members in tensors.items() for name in members}
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


@torch.no_grad()
def gather_whole(tensors: Tensors, group: dist.ProcessGroup) -> dict[str, dict[str, Tensor]]:
    """All tensors of `group`, whole and on the host, on the first process of the run; the others get nothing.

    Every process of the run calls this. A tensor that several have is taken from the first of them; sharded ones are
    put together by all.
    """
    rank = dist.get_rank()
    members = dist.get_process_group_ranks(group)
    whole: dict[str, dict[str, Tensor]] = {kind: {} for kind in tensors}
    for kind, own in tensors.items():
        for name, tensor in own.items():
            if isinstance(tensor, DTensor):
                full = tensor.full_tensor()
                if rank == 0:
                    whole[kind][name] = full.cpu()
            elif rank == 0:
                whole[kind][name] = tensor.detach().cpu()
    if 0 not in members:
        return {}
    held = names_held(tensors, group)
    for kind, name in sorted(set().union(*held) - held[0]):
        owner = next(index for index, names in enumerate(held) if (kind, name) in names)
        found = _send_to_first(tensors.get(kind, {}).get(name), members[owner], group)
        if found is not None:
            whole.setdefault(kind, {})[name] = found
    return whole if rank == 0 else {}


def _send_to_first(tensor: Tensor | None, owner: int, group: dist.ProcessGroup) -> Tensor | None:
    """A tensor that only `owner` has, on the first process."""
    rank = dist.get_rank()
    if rank == owner:
        assert tensor is not None
        dist.send_object_list([(tuple(tensor.shape), tensor.dtype)], dst=0, group=group)
        dist.send(tensor.detach().cpu().contiguous(), dst=0, group=group)
    elif rank == 0:
        facts: list[Any] = [None]
        dist.recv_object_list(facts, src=owner, group=group)
        shape, dtype = facts[0]
        found = torch.empty(shape, dtype=dtype)
        dist.recv(found, src=owner, group=group)
        return found
    return None


def read_own(stored: StoredTensors, own: Tensors, known: Collection[tuple[str, str]]) -> dict[str, dict[str, Tensor]]:
    """What this process needs of a checkpoint, cut as its `own` tensors are; nothing else is read.

    `known` are all names that some process has; of those a process reads only its own. A tensor that nobody knows, or
    that does not fit, is read whole by all: who takes it up refuses it in the words for that.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for kind, shapes in stored.shapes().items():
        found[kind] = {}
        for name, shape in shapes.items():
            mine = own.get(kind, {}).get(name)
            if mine is not None or (kind, name) not in known:
                found[kind][name] = _read_like(stored, kind, name, shape, mine)
    return found


def _read_like(stored: StoredTensors, kind: str, name: str, shape: tuple[int, ...], own: Tensor | None) -> Tensor:
    if not isinstance(own, DTensor) or tuple(own.shape) != shape:
        return stored.read(kind, name)
    if not is_simple(own):
        whole = stored.read(kind, name).to(own.device)
        return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
    part = stored.read(kind, name, describe_piece(own).box).to(own.device)
    return DTensor.from_local(
        part, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
