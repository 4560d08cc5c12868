"""Splitting weights, gradients and optimizer state over ranks (ZeRO 0 to 3), and gathering whole tensors.

ZeRO 2 and 3 are PyTorch's FSDP2. With ZeRO 0 and 1 every rank has all weights: their gradients are added up here, and
ZeRO 1 leaves each rank the optimizer state of a part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

# Numbers sent in one piece: large enough to use the wires, small enough to send one while the next is put together.
BUCKET_NUMBERS = 16_000_000


# Weights in parts: ZeRO 2 and 3


def apply_fsdp(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    keep_gathered: bool,
    gather: torch.dtype = torch.float32,
) -> None:
    """Shard each block and what is left of the model; parameters keep their names and become DTensors.

    A mesh of two axes is (copies, parts): each group of parts holds the whole model. With `keep_gathered` (ZeRO 2) a
    block's weights stay whole from the forward to the backward pass. They are gathered in the dtype `gather`. Inputs
    are not cast, because numbers such as positions lose their meaning in half precision; sums are always float32.
    """
    is_half = gather != torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=gather if is_half else None,
        reduce_dtype=torch.float32 if is_half else None,
        cast_forward_inputs=False,
    )
    # A view as output would lose its gathering hook if someone changed it in place.
    model.register_forward_hook(lambda _, inputs, output: output.clone() if output._is_view() else output)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep_gathered, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keep_gathered, mp_policy=policy)


def match_fsdp_rounding(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Add up gradients in the order of `apply_fsdp`, where one rank holds all weights.

    A tensor that several blocks are given, such as a modulation vector, has a gradient from each use. FSDP
    passes a block's inputs through one node, so uses add up inside each block first; without it they would be added to
    one running sum, which rounds otherwise.
    """

    def enter(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return tree_map_only(Tensor, lambda x: x.view_as(x) if x.requires_grad else x, (args, options))

    for module in (*blocks, model):
        module.register_forward_pre_hook(enter, with_kwargs=True)


def expect_backward(model: nn.Module, *, is_last: bool, keep_gathered: bool) -> None:
    """Send gradients with the last backward pass of a step only; until then whole gradients add up here."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(is_last)
    if keep_gathered:
        # The next micro-batch would gather the same weights again.
        model.set_reshard_after_backward(is_last)


# Whole weights: ZeRO 0 and 1


@torch.no_grad()
def add_up_gradients(
    params: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, most: int = BUCKET_NUMBERS
) -> None:
    """Give each parameter the sum of its gradients over `group`.

    A parameter that no rank used keeps None, so that its optimizer state rests, as it does with one rank. Which ones
    were used may differ between ranks: how many of them used it travels behind the numbers.
    """
    whole = [param for param in params if param.requires_grad and not isinstance(param, DTensor)]
    sent: list[tuple[Sequence[nn.Parameter], Tensor, Any]] = []
    for members in _fill_buckets(whole, most):
        used = members[0].new_tensor([0.0 if param.grad is None else 1.0 for param in members])
        parts = [torch.zeros_like(param) if param.grad is None else param.grad for param in members]
        flat = torch.cat([*(part.reshape(-1) for part in parts), used])
        for param in members:
            param.grad = None
        sent.append((members, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for params, flat, work in sent:
        work.wait()
        *parts, counts = torch.split(flat, [*(param.numel() for param in params), len(params)])
        for param, part, count in zip(params, parts, counts.tolist(), strict=True):
            param.grad = part.view_as(param) if count else None


def _fill_buckets(params: Sequence[nn.Parameter], most: int) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one dtype and device, up to `most` numbers together."""
    waiting: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in params:
        members = waiting.setdefault((param.dtype, param.device), [])
        if members and sum(member.numel() for member in members) + param.numel() > most:
            yield waiting.pop((param.dtype, param.device))
            members = waiting.setdefault((param.dtype, param.device), [])
        members.append(param)
    yield from waiting.values()


def sync_gradients(params: Sequence[nn.Parameter], num_ranks: int, factor: float = 1.0) -> None:
    """Give each parameter the sum of its gradients over all ranks, times `factor`.

    FSDP averages over ranks where a sum is meant. The loss could be multiplied instead, but then gradients in fp16
    would overflow earlier than without sharding.
    """
    add_up_gradients(params, None)
    scale_gradients([param for param in params if not isinstance(param, DTensor)], factor)
    scale_gradients([param for param in params if isinstance(param, DTensor)], factor * num_ranks)


@torch.no_grad()
def scale_gradients(params: Sequence[nn.Parameter], factor: float) -> None:
    grads = [param.grad for param in params if param.grad is not None]
    if grads and factor != 1.0:
        torch._foreach_mul_(grads, factor)


def choose_owners(sizes: Mapping[str, int], num_owners: int) -> dict[str, int]:
    """Which of `num_owners` keeps the state of each weight: the largest first, each to whom has least."""
    loads = [0] * num_owners
    owners = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += size
    return owners


def shard_state(
    optimizer: Optimizer,
    params: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup,
    *,
    index: int,
    ranks: Sequence[int],
    allocate: Callable[[Optimizer], None],
) -> None:
    """Keep the state of a part of `params` on this rank and have the others' parts moved by them (ZeRO 1).

    Each weight belongs to one rank of `group` as a whole, so optimizers that look at whole matrices work too. The names
    of this rank's weights become `optimizer.own_names`. After a step every rank sends the weights that it has moved.
    `ranks` are the global ranks of the group, of which this is number `index`. `allocate` gives the optimizer its state
    before the hooks of a step are there, which would wait for the other ranks.
    """
    owners = choose_owners({name: param.numel() for name, param in params.items()}, len(ranks))
    optimizer.own_names = frozenset(name for name in params if owners[name] == index)  # type: ignore[attr-defined]
    others = [param for name, param in params.items() if owners[name] != index]
    by_owner = [[param for name, param in params.items() if owners[name] == owner] for owner in range(len(ranks))]

    def rest(*args: Any) -> None:
        for param in others:
            param.grad = None

    def send(*args: Any) -> None:
        _exchange(by_owner, group, index, ranks)

    allocate(optimizer)
    optimizer.register_step_pre_hook(rest)
    optimizer.register_step_post_hook(send)


@torch.no_grad()
def _exchange(
    by_owner: Sequence[Sequence[nn.Parameter]], group: dist.ProcessGroup, index: int, ranks: Sequence[int]
) -> None:
    """Every weight as its owner has it, on all ranks."""
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


# Whole tensors from parts


@torch.no_grad()
def gather_whole(tensors: Mapping[str, Mapping[str, Tensor]], group: dist.ProcessGroup) -> dict[str, dict[str, Tensor]]:
    """All `tensors` (by kind and name) of `group`, whole and on the host, on rank 0; the other ranks get nothing.

    Every rank of the job calls this. A tensor that several have is taken from the first of them; sharded ones are put
    together by all. They come one after the other, so rank 0 needs memory for all of them and one more.
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
    held: list[Any] = [None] * len(members)
    dist.all_gather_object(held, {(kind, name) for kind, own in tensors.items() for name in own}, group=group)
    for kind, name in sorted(set().union(*held) - held[0]):
        owner = next(index for index, names in enumerate(held) if (kind, name) in names)
        found = _send_to_first(tensors.get(kind, {}).get(name), members[owner], group)
        if found is not None:
            whole.setdefault(kind, {})[name] = found
    return whole if rank == 0 else {}


def _send_to_first(tensor: Tensor | None, owner: int, group: dist.ProcessGroup) -> Tensor | None:
    """A tensor that only `owner` has, on rank 0."""
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
