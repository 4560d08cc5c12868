"""Gradients of whole weights, added up over processes, and optimizer state that they split (ZeRO 0 and 1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from frameloom.train.optimizer import allocate_state, params_by_name

# Numbers sent in one piece: large enough to use the wires, small enough to send one while the next is put together.
BUCKET_NUMBERS = 16_000_000


@torch.no_grad()
def add_up_gradients(
    params: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, factor: float = 1.0, most: int = BUCKET_NUMBERS
) -> None:
    """Give each parameter the sum of its gradients over `group`, times `factor`.

    A parameter that no process used keeps None, so that its optimizer state rests, as it does with one process. Which
    ones were used may differ between processes: how many of them used it travels behind the numbers.
    """
    whole = [param for param in params if param.requires_grad and not isinstance(param, DTensor)]
    sent = [_Bucket(members, group) for members in _fill_buckets(whole, most)]
    for bucket in sent:
        bucket.take_back(factor)


class _Bucket:
    """A piece on its way."""

    def __init__(self, params: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.params = params
        first = params[0]
        used = [0.0 if param.grad is None else 1.0 for param in params]
        parts = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        counts = torch.tensor(used, dtype=first.dtype, device=first.device)
        self.flat = torch.cat([*(part.reshape(-1) for part in parts), counts])
        for param in params:
            param.grad = None
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def take_back(self, factor: float) -> None:
        assert self.work is not None
        self.work.wait()
        sizes = [param.numel() for param in self.params]
        *parts, counts = torch.split(self.flat, [*sizes, len(self.params)])
        if factor != 1.0:
            torch._foreach_mul_(parts, factor)
        for param, part, count in zip(self.params, parts, counts.tolist(), strict=True):
            param.grad = part.view_as(param) if count else None


def _fill_buckets(params: Sequence[nn.Parameter], most: int) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one number format and device, up to `most` numbers together."""
    waiting: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in params:
        members = waiting.setdefault((param.dtype, param.device), [])
        if members and sum(member.numel() for member in members) + param.numel() > most:
            yield waiting.pop((param.dtype, param.device))
            members = waiting.setdefault((param.dtype, param.device), [])
        members.append(param)
    yield from waiting.values()


def choose_owners(sizes: Mapping[str, int], num_owners: int) -> dict[str, int]:
    """Which of `num_owners` keeps the state of each weight: the largest first, each to whom has least."""
    loads = [0] * num_owners
    owners = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += size
    return owners


def split_state(optimizer: Optimizer, group: dist.ProcessGroup, *, index: int, ranks: Sequence[int]) -> None:
    """Keep the state of a part of the weights here and have the others' parts moved by them (ZeRO 1).

    Each weight belongs to one process of `group` as a whole, so optimizers that look at whole matrices work too. After
    a step every process sends the weights that it has moved. `ranks` are the processes of the group in the whole run,
    of which this is number `index`. State is allocated here; the hooks of a step would wait for a process without any.
    """
    params = params_by_name(optimizer)
    owners = choose_owners({name: param.numel() for name, param in params.items()}, len(ranks))
    optimizer.own_names = frozenset(name for name in params if owners[name] == index)  # type: ignore[attr-defined]
    others = [param for name, param in params.items() if owners[name] != index]
    by_owner = [[param for name, param in params.items() if owners[name] == owner] for owner in range(len(ranks))]

    def rest(*args: Any) -> None:
        for param in others:
            param.grad = None

    def send(*args: Any) -> None:
        _exchange(by_owner, group, index, ranks)

    allocate_state(optimizer)
    optimizer.register_step_pre_hook(rest)
    optimizer.register_step_post_hook(send)


@torch.no_grad()
def _exchange(
    by_owner: Sequence[Sequence[nn.Parameter]], group: dist.ProcessGroup, index: int, ranks: Sequence[int]
) -> None:
    """Every weight as its owner has it, on all processes."""
    sent: list[tuple[Sequence[nn.Parameter], Tensor, Any]] = []
    for owner, params in enumerate(by_owner):
        for members in _fill_buckets(params, BUCKET_NUMBERS):
            flat = torch.cat([member.reshape(-1) for member in members])
            work = dist.broadcast(flat, src=ranks[owner], group=group, async_op=True)
            sent.append(([] if owner == index else members, flat, work))
    for others, flat, work in sent:
        work.wait()
        parts = torch.split(flat, [other.numel() for other in others]) if others else ()
        for other, part in zip(others, parts, strict=True):
            other.copy_(part.view_as(other))
