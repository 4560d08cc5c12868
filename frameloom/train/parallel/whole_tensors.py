"""Whole tensors from parts and parts from whole tensors: what a checkpoint that any number of processes can read needs.

Saving gathers each tensor on the first process, one after the other, so memory there holds the checkpoint and one
tensor more. Loading sends each tensor from the first process, and every process keeps its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

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


@torch.no_grad()
def spread_whole(
    whole: Tensors | None, own: Tensors, known: set[tuple[str, str]], device: torch.device
) -> dict[str, dict[str, Tensor]]:
    """What each process needs of the tensors that the first one has, cut as its `own` are.

    `known` are all names that some process has; of those a process gets only its own. A tensor that nobody knows, or
    that does not fit, comes whole to all: who takes it up refuses it in the words for that.
    """
    facts: list[Any] = [None]
    if whole is not None:
        facts = [
            [(kind, name, tuple(tensor.shape), tensor.dtype) for name, tensor in members.items()]
            for kind, members in whole.items()
        ]
        facts = [[(kind, {}) for kind in whole], [fact for part in facts for fact in part]]
    else:
        facts = [None, None]
    dist.broadcast_object_list(facts, src=0)
    spread: dict[str, dict[str, Tensor]] = dict(facts[0])
    for kind, name, shape, dtype in facts[1]:
        sent = torch.empty(shape, dtype=dtype, device=device)
        if whole is not None:
            sent.copy_(whole[kind][name])
        dist.broadcast(sent, src=0)
        mine = own.get(kind, {}).get(name)
        if mine is not None or (kind, name) not in known:
            spread[kind][name] = _cut_like(sent, mine)
    return spread


def _cut_like(whole: Tensor, own: Tensor | None) -> Tensor:
    if isinstance(own, DTensor) and own.shape == whole.shape:
        return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
    return whole
