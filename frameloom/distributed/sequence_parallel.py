"""Sequence parallelism (Ulysses): the tokens of one sequence lie on several ranks, a sequence group.

Each rank holds a part of the tokens with all heads, and all weights. Everything but self-attention works on tokens one
by one. Around self-attention the ranks exchange: a rank gives away most heads of its tokens and gets the tokens of all
ranks for its own share of the heads, attends, and exchanges back. So the number of heads limits the number of ranks.

    split            own part of a sequence; the last parts are filled up with zeros to equal lengths
    attention        queries, keys and values to (all tokens, own heads); filled-up keys are left out; the result back
    gather           the whole sequence on all ranks, as it was without the group

Gradients. All ranks of a group have the same sequence and, behind `gather`, the same loss. What a rank computes of a
weight's gradient comes from its own tokens: the sum over the group is the gradient. `gather` multiplies it with the
number of ranks on its way back (reduction "mean"), so that the mean over the group is exact, and with it the mean over
all ranks of a run, data parallel ones included, which is what DDP and FSDP compute. With reduction "sum" it does not.
This holds for every weight, also for those that all ranks use alike (modulation, the keys of a cross-attention): each
rank's gradient there is the part that comes back from its own tokens.

A joint sequence is a prefix, which may be short, and the rest: a rank's part may hold tokens of one of them or of both.

Shape letters: B batch, N tokens of the whole sequence, S of a part, P ranks, H heads, h = H / P, D width of a head, K
tokens of a prefix, R of the rest, W width. `_` stands for any dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.errors import ConfigError

_NO_NAME = dist.GroupName("")


@dataclass(frozen=True)
class SequenceGroup:
    """One rank's place in its group; `name` is that of the process group. The group of one rank does nothing."""

    rank: int = 0
    degree: int = 1
    name: dist.GroupName = _NO_NAME
    reduction: Literal["mean", "sum"] = "mean"
    """how the trainer joins the weights' gradients of the group"""

    def part_length(self, length: int) -> int:
        """Tokens of every part, filling included."""
        return -(-length // self.degree)

    def find_first(self, length: int) -> int:
        """Where the own part begins."""
        return self.rank * self.part_length(length)

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """The own part along `dim`, filled up with zeros."""
        if self.degree == 1:
            return x
        part = self.part_length(x.shape[dim])
        return _fill(_slice(x, self.rank * part, (self.rank + 1) * part, dim), part, dim)

    def split_prefix(self, prefix_BKW: Tensor, num_rest: int) -> Tensor:
        """The prefix in the own part of a joint sequence: on most ranks that is none."""
        if self.degree == 1:
            return prefix_BKW
        part = self.part_length(prefix_BKW.shape[-2] + num_rest)
        return _slice(prefix_BKW, self.rank * part, (self.rank + 1) * part, -2)

    def split_rest(self, rest_BRW: Tensor, num_prefix: int) -> Tensor:
        """The rest in the own part of a joint sequence, with the filling."""
        if self.degree == 1:
            return rest_BRW
        part = self.part_length(num_prefix + rest_BRW.shape[-2])
        start, stop = self.rank * part - num_prefix, (self.rank + 1) * part - num_prefix
        return _fill(_slice(rest_BRW, start, stop, -2), min(part, max(stop, 0)), -2)

    def gather(self, part: Tensor, length: int, dim: int = 1) -> Tensor:
        """The whole from equal parts, on all ranks, cut to `length`."""
        if self.degree == 1:
            return part
        return cast(Tensor, _Gather.apply(part, self, dim)).narrow(dim, 0, length)  # type: ignore[no-untyped-call]

    def gather_rest(self, part_BSW: Tensor, num_prefix: int, num_rest: int) -> Tensor:
        """All of the rest of a joint sequence, from parts whose prefix has been left out."""
        if self.degree == 1:
            return part_BSW
        length = num_prefix + num_rest
        missing = self.part_length(length) - part_BSW.shape[1]
        return self.gather(F.pad(part_BSW, (0, 0, missing, 0)), length)[:, num_prefix:]

    def count_table(self, length: int, device: torch.device) -> Tensor | None:
        """A rotary table without pairs [N, 1, 0], for attention that must know the length of the whole and no more."""
        return None if self.degree == 1 else torch.empty(length, 1, 0, device=device)

    def add_up(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """The sums over all ranks, on all ranks."""
        if self.degree == 1:
            return list(numbers)
        own = torch.tensor(numbers, device=device)
        found: list[float] = _wait(collectives.all_reduce(own, "sum", self.name)).tolist()
        return found

    def exchange_heads(self, *parts_BSHD: Tensor) -> tuple[Tensor, ...]:
        """[B, S, H, D] of own tokens to [B, P * S, h, D] of all tokens, in one message; S may differ."""
        lengths = [part.shape[1] for part in parts_BSHD]
        by_rank = [torch.unflatten(part, 2, (self.degree, -1)).movedim(2, 0) for part in parts_BSHD]
        received_PBShD = self._exchange(torch.cat(by_rank, dim=2))
        return tuple(part.movedim(0, 1).flatten(1, 2) for part in torch.split(received_PBShD, lengths, dim=2))

    def exchange_tokens(self, attended_BNW: Tensor) -> Tensor:
        """Back: own heads of all tokens [B, P * S, h * D] to all heads of own tokens [B, S, H * D]."""
        by_rank = torch.unflatten(attended_BNW, 1, (self.degree, -1)).movedim(1, 0)
        return self._exchange(by_rank).movedim(0, 2).flatten(2)

    def _exchange(self, by_rank_P_: Tensor) -> Tensor:
        """Give the p-th slice to rank p, get one from each; its gradient goes the same ways back."""
        return _wait(collectives.all_to_all_single(by_rank_P_.contiguous(), None, None, self.name))


ALONE = SequenceGroup()


def join_sequence_group(
    group: dist.ProcessGroup | None = None, *, reduction: Literal["mean", "sum"] = "mean"
) -> SequenceGroup:
    """This rank's place in a process group, such as the `sequence` axis of a device mesh; None: all ranks."""
    group = group or dist.group.WORLD
    if group is None or group.size() == 1:
        return ALONE
    return SequenceGroup(group.rank(), group.size(), group.group_name, reduction)


def divide_ranks(degree: int, *, reduction: Literal["mean", "sum"] = "mean") -> SequenceGroup:
    """Groups of `degree` neighbouring ranks, and this rank's place in its own. All ranks must call it."""
    if degree == 1:
        return ALONE
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks % degree:
        raise ConfigError(
            f"{num_ranks} ranks cannot be divided into sequence groups of {degree}; choose a divisor of {num_ranks}"
        )
    group, _ = dist.new_subgroups(degree)  # type: ignore[no-untyped-call]
    return join_sequence_group(group, reduction=reduction)


def set_sequence_group(model: nn.Module, group: SequenceGroup) -> None:
    """Let `group` share the tokens in every module of `model` that has a `sequence`; a group of one undoes it."""
    for module in model.modules():
        if isinstance(getattr(module, "sequence", None), SequenceGroup):
            module.sequence = group  # type: ignore[assignment]


def find_sequence_group(model: nn.Module) -> SequenceGroup:
    """The group that shares the tokens of a model; that of one rank where none was set."""
    found = (getattr(module, "sequence", None) for module in model.modules())
    return next((group for group in found if isinstance(group, SequenceGroup)), ALONE)


def exchanged_bytes(
    num_tokens: int, width: int, degree: int, *, batch: int = 1, number_bytes: int = 2, num_keys: int | None = None
) -> int:
    """Bytes that one rank sends for one self-attention, forward; the backward pass sends as many again.

    Of queries, keys, values and the result, each S * W numbers, a rank keeps 1 / P and sends the rest:
    4 * B * S * W * (P - 1) / P, with S = ceil(N / P); that is 4 * N * W * (P - 1) / P^2 for a sequence that divides.
    `num_keys` is the number of keys where it differs.
    """
    part, part_keys = (-(-count // degree) for count in (num_tokens, num_keys or num_tokens))
    return 2 * (part + part_keys) * batch * width * number_bytes * (degree - 1) // degree


@dataclass(frozen=True)
class Exchange:
    """A self-attention whose tokens lie on several ranks: for each sample, `sequences` of `tokens` tokens each.

    `keys` is the number of keys where it differs.
    """

    tokens: int
    width: int
    sequences: int = 1
    keys: int | None = None

    def sent_bytes(self, degree: int, *, batch: int, number_bytes: int) -> int:
        """By one rank, forward; the backward pass sends as many again."""
        count = batch * self.sequences
        return exchanged_bytes(
            self.tokens, self.width, degree, batch=count, number_bytes=number_bytes, num_keys=self.keys
        )


class _Gather(torch.autograd.Function):
    """All parts one behind the other. All ranks go on alike, so a rank's own slice of the gradient is all of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: SequenceGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        rows = part.movedim(dim, 0).contiguous()
        return _wait(collectives.all_gather_single(rows, 0, group.name)).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        group, part = ctx.group, grad.shape[ctx.dim] // ctx.group.degree
        own = grad.narrow(ctx.dim, group.rank * part, part)
        return own * group.degree if group.reduction == "mean" else own, None, None


def _wait(received: Tensor) -> Tensor:
    return received.wait() if isinstance(received, collectives.AsyncCollectiveTensor) else received


def _slice(x: Tensor, start: int, stop: int, dim: int) -> Tensor:
    """From `start` to `stop`, as far as x reaches; either may lie outside."""
    start, stop = (min(max(place, 0), x.shape[dim]) for place in (start, stop))
    return x.narrow(dim, start, stop - start)


def _fill(x: Tensor, length: int, dim: int) -> Tensor:
    missing = length - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim=dim)
