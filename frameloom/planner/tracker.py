"""Counting operations, live bytes and bytes moved of a forward and backward pass in shapes only.

Every tensor operation is seen as it is dispatched; storages are counted from their first sight to their end, as an
allocator without fragments would. Attention stands for a fused kernel, which keeps no scores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from frameloom.core.device import without_collector
from frameloom.planner.shape_tensors import Ghost, GhostMode, Known

# A fused backward pass computes the scores again: five products where the forward pass has two.
_BACKWARD_RATIO = 2.5


class Work(NamedTuple):
    """Of one operation."""

    flops: int = 0
    fixed_moved: int = 0
    samples_moved: int = 0


@dataclass
class Tally:
    """Of a pass of `batch` samples: operations, bytes that live beside the weights, and bytes that are moved by
    operations other than products of matrices, whose time is that of the memory.

    A size that the batch divides is one of samples, any other is the same for every batch (casts of weights): give a
    batch that divides no size of a model. With one sample all are samples' sizes.

    `fronts` has, for each amount of gradients that there was, the pairs of fixed and samples' bytes that lived with it;
    without the gradients, and without pairs that are below another one in both.
    """

    batch: int = 1
    flops: int = 0
    fixed_moved: int = 0
    samples_moved: int = 0
    fixed: int = 0
    samples: int = 0
    gradients: int = 0
    fronts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Without the gradients."""
        return max((sum(pair) for front in self.fronts.values() for pair in front), default=0)

    def work(self, done: Work) -> None:
        self.flops += done.flops
        self.fixed_moved += done.fixed_moved
        self.samples_moved += done.samples_moved

    def add(self, num_bytes: int) -> None:
        if num_bytes % self.batch:
            self.fixed += num_bytes
        else:
            self.samples += num_bytes
        if num_bytes > 0:
            self._keep_front()

    def _keep_front(self) -> None:
        fixed, samples = self.fixed - self.gradients, self.samples
        front = self.fronts.setdefault(self.gradients, [])
        if not any(fixed <= most_fixed and samples <= most_samples for most_fixed, most_samples in front):
            front[:] = [pair for pair in front if pair[0] > fixed or pair[1] > samples]
            front.append((fixed, samples))


class _Watch:
    """Adds each operation to a tally."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._known_work: dict[Known, Work] = {}
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, known: Known | None) -> None:
        made = [item for item in (out if isinstance(out, tuple | list) else (out,)) if isinstance(item, Tensor)]
        work = None if known is None else self._known_work.get(known)
        if work is None:
            work = self._weigh(func, args, kwargs, out, made)
            if known is not None:
                self._known_work[known] = work
        self.tally.work(work)
        for item in made:
            self._take(item)

    def _weigh(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, made: Sequence[Tensor]) -> Work:
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            return Work(flops=count(*args, **kwargs, out_val=out))
        if func.is_view:
            return Work()
        sizes = [item.nbytes for item in (*args, *made) if isinstance(item, Tensor)]
        samples = sum(size for size in sizes if size % self.tally.batch == 0)
        return Work(fixed_moved=sum(sizes) - samples, samples_moved=samples)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Storages that are there before the pass: the weights."""
        for tensor in tensors:
            assert isinstance(tensor, Ghost)
            storage = tensor.shapes.untyped_storage()
            self._seen[storage._cdata] = weakref.ref(storage)

    def _take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self._seen:
            return
        self.tally.add(num_bytes)

        def forget(_: object) -> None:
            self.tally.add(-num_bytes)
            self._seen.pop(address, None)

        self._seen[address] = weakref.ref(storage, forget)


class _FusedAttention(torch.autograd.Function):
    """What a fused kernel allocates and computes; no numbers."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tally: Tally) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.flops = 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        ctx.tally = tally
        tally.flops += ctx.flops
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        ctx.tally.flops += int(_BACKWARD_RATIO * ctx.flops)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


@contextmanager
def _fused_attention(tally: Tally) -> Iterator[None]:
    """Inside the block attention is the stand-in. A function mode would be off while blocks are recomputed."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *masks: Any, **options: Any) -> Any:
        return _FusedAttention.apply(_cast(query), _cast(key), _cast(value), tally)  # type: ignore[no-untyped-call]

    own = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = own


def _cast(tensor: Tensor) -> Tensor:
    """As automatic casts do with what attention is given."""
    return tensor.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else tensor


@contextmanager
def tally_passes(model: nn.Module, mode: GhostMode, *, batch: int = 1) -> Iterator[Tally]:
    """Count all that happens inside the block; the weights of `model` are ghosts, and `mode` is on."""
    tally = Tally(batch)
    watch = _Watch(tally)
    watch.ignore([*model.parameters(), *model.buffers()])
    hooks = [
        parameter.register_post_accumulate_grad_hook(_count_gradient(tally))  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        mode.on_operation = watch
        with _fused_attention(tally), without_collector():
            yield tally
    finally:
        mode.on_operation = None
        for hook in hooks:
            hook.remove()
        for parameter in model.parameters():
            parameter.grad = None


def _count_gradient(tally: Tally) -> Callable[[Tensor], None]:
    def count(parameter: Tensor) -> None:
        assert parameter.grad is not None
        tally.gradients += parameter.grad.nbytes

    return count
