"""Which part of each tensor a process holds, and who writes what into which file.

A piece is a box of a whole tensor: rows 32 to 63 of a weight, or all of it. What several processes hold alike is
written by one of them, chosen so that all write about as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from frameloom.checkpoint.sharded import name_shards

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Box",
    "FilePlan",
    "Layout",
    "Piece",
    "describe_piece",
    "describe_pieces",
    "is_simple",
    "is_split",
    "plan_files",
    "take_local",
]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size) along each dim"""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of `shape`, on one process."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.itemsize

    @property
    def is_whole(self) -> bool:
        return self.size == self.shape

    @property
    def box(self) -> Box:
        return self.offset, self.size


Layout = dict[str, dict[str, Piece]]
"""group -> name -> what a process holds of it"""


def is_split(tensor: Tensor) -> TypeGuard[DTensor]:
    """Plain tensors are told apart first: importing DTensor takes a second, and most commands never have one."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def is_simple(tensor: Tensor) -> bool:
    """Whether a process holds one box of it; strided splits of several axes are scattered rows."""
    if not is_split(tensor):
        return True
    from torch.distributed.tensor import Replicate, Shard

    return all(type(placement) in (Shard, Replicate) for placement in tensor.placements)


def describe_piece(tensor: Tensor) -> Piece:
    shape, itemsize = tuple(tensor.shape), tensor.dtype.itemsize
    if not is_split(tensor):
        return Piece(shape, (0,) * len(shape), shape, itemsize)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return Piece(shape, tuple(chunk.offsets), tuple(chunk.sizes), itemsize)


def describe_pieces(tensors: Mapping[str, Mapping[str, Tensor]]) -> Layout:
    """All that this process holds; of a tensor with fewer rows than processes that may be nothing."""
    found = {group: {name: describe_piece(value) for name, value in named.items()} for group, named in tensors.items()}
    return {
        group: {name: piece for name, piece in named.items() if piece.num_bytes or piece.is_whole}
        for group, named in found.items()
    }


@torch.no_grad()
def take_local(tensor: Tensor) -> Tensor:
    """The numbers of this process, not copied."""
    found = tensor.detach()
    return found.to_local() if is_split(found) else found


@dataclass(frozen=True)
class FilePlan:
    """`files[rank][file]` are the (group, name) that a process writes into a file.

    `placement[group][name]` says where the pieces of a tensor are; a group in one file needs none.
    """

    files: list[dict[str, list[tuple[str, str]]]]
    placement: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_bytes: int = 0


def plan_files(layouts: Sequence[Layout]) -> FilePlan:
    """One file for each group and each process that writes something of it; `layouts` are those of all processes."""
    writers = _choose_writers(layouts)
    files: list[dict[str, list[tuple[str, str]]]] = [{} for _ in layouts]
    placement: dict[str, dict[str, Any]] = {}
    for group in sorted({group for layout in layouts for group in layout}):
        ranks = sorted({rank for (kind, _, _), rank in writers.items() if kind == group})
        # A group without tensors is a file all the same: whether it is there says how the run was set up.
        names = name_shards(group, max(len(ranks), 1))
        numbers = {rank: number for number, rank in enumerate(ranks)} or {0: 0}
        for rank, number in numbers.items():
            files[rank][names[number]] = []
        for (kind, name, box), rank in writers.items():
            if kind != group:
                continue
            files[rank][names[numbers[rank]]].append((group, name))
            if len(names) > 1:
                entry = placement.setdefault(group, {}).setdefault(name, {"parts": []})
                entry["shape"] = list(layouts[rank][group][name].shape)
                entry["parts"].append([numbers[rank] + 1, list(box[0]), list(box[1])])
    for named in placement.values():
        for entry in named.values():
            entry["parts"].sort()
    num_bytes = sum(layouts[rank][group][name].num_bytes for (group, name, _), rank in writers.items())
    return FilePlan(files, placement, num_bytes)


def _choose_writers(layouts: Sequence[Layout]) -> dict[tuple[str, str, Box], int]:
    """The process that writes each piece: its only holder; of several, the one with least to write so far."""
    holders: dict[tuple[str, str, Box], list[int]] = {}
    for rank, layout in enumerate(layouts):
        for group, named in layout.items():
            for name, piece in named.items():
                holders.setdefault((group, name, piece.box), []).append(rank)
    sizes = {key: layouts[ranks[0]][key[0]][key[1]].num_bytes for key, ranks in holders.items()}
    loads = [0] * len(layouts)
    writers: dict[tuple[str, str, Box], int] = {}
    # What can only go to one place goes first, then the largest: the small ones even out the rest.
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
        writers[key] = min(holders[key], key=lambda rank: (loads[rank], rank))
        loads[writers[key]] += sizes[key]
    return dict(sorted(writers.items()))
