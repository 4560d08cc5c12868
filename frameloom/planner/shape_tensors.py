"""Tensors with a shape but no numbers, and what a pass over them computes, allocates and moves.

Every operation is seen as it is dispatched. Storages are counted from their first sight to their end, as an allocator
without fragments would count them; attention stands for a fused kernel, which keeps no scores.

Shape tensors claim to be on the host: plain tensors on the meta device would not do, since automatic casts do not know
that device. They do what torch's FakeTensor does, four times faster for a model of 11 billion parameters, because they
know one device, check nothing and remember the result of an operation for shapes that they have met.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch._dynamo  # the next module loads it with its first operation: here once, before processes fork
import torch._meta_registrations  # operations on the meta device that torch defines in Python
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from frameloom.core.device import without_collector

_META, _HOST = torch.device("meta"), torch.device("cpu")
# A fused backward pass computes the scores again: five products where the forward pass has two.
_BACKWARD_RATIO = 2.5

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""shape, stride and dtype: all that the result of an operation depends on, as tensors have no numbers here"""

_Work = tuple[int, int, int]
"""of an operation: floating-point operations, and bytes moved, fixed ones and samples' ones"""


@dataclass(frozen=True)
class _Known:
    """What an operation makes of forms that it was given before, and its work by the batch that was counted with."""

    forms: Sequence[_Form | None]
    work: dict[int, _Work] = field(default_factory=dict)


class ShapeTensor(Tensor):
    """Looks like a tensor on the host; `shapes` has its shape, and a storage that views share."""

    shapes: Tensor
    form: _Form

    @staticmethod
    def __new__(cls, inner: Tensor) -> ShapeTensor:
        form = _form(inner)
        made: ShapeTensor = torch.Tensor._make_wrapper_subclass(
            cls, form[0], strides=form[1], storage_offset=inner.storage_offset(), dtype=form[2], device=_HOST
        )
        made.shapes, made.form = inner, form
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with ShapeMode():
            return func(*args, **(kwargs or {}))


def _form(tensor: Tensor) -> _Form:
    return tensor.shape, tensor.stride(), tensor.dtype


class ShapeMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, tensors are made and changed in shape only; `tally`, if set, counts every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tally: Tally | None = None
        self._known: dict[Any, _Known] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here, and the wrapper that says so costs a tenth of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts: list[Any] = [func, *(kwargs or ())]
        in_shapes: list[bool] = []
        given = _unwrap(args, facts, in_shapes)
        if in_shapes and not any(in_shapes):  # small tables may be computed
            return func(*args, **(kwargs or {}))
        named = dict(zip(kwargs, _unwrap(kwargs.values(), facts, in_shapes), strict=True)) if kwargs else {}
        is_plain, takes_device = _read_schema(func)
        if "device" in named or (not in_shapes and takes_device):
            named["device"] = _META
        known = None
        if is_plain:
            key = tuple(facts)
            known = self._known.get(key)
            if known is None:
                out = func(*given, **named)
                results = out if isinstance(out, tuple) and len(out) > 1 else (out,)
                if all(item is None or isinstance(item, Tensor) for item in results):
                    self._known[key] = _Known([None if item is None else _form(item) for item in results])
            else:  # blocks are alike: most is not worked out again
                made = [
                    None if form is None else torch.empty_strided(form[0], form[1], dtype=form[2], device=_META)
                    for form in known.forms
                ]
                out = tuple(made) if len(made) > 1 else made[0]
        else:
            out = func(*given, **named)
        if self.tally is not None:
            self.tally.count(func, given, named, out, known)
        return _wrap(out, () if is_plain else args, given)


@cache
def _read_schema(func: Any) -> tuple[bool, bool]:
    """Whether it makes new tensors, instead of a view or a change of its inputs; and whether it takes a device."""
    schema = func._schema
    return not func.is_view and not schema.is_mutable, any(one.name == "device" for one in schema.arguments)


def _unwrap(items: Iterable[Any], facts: list[Any], in_shapes: list[bool]) -> list[Any]:
    """The tensors on the meta device behind shape tensors. `facts` get what is equal for equal results, `in_shapes`
    whether each tensor was a shape tensor."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, ShapeTensor):
            in_shapes.append(True)
            facts.append(item.form)
            found.append(item.shapes)
        elif isinstance(item, Tensor):
            in_shapes.append(False)
            facts.append(_form(item))
            found.append(item.to(_META))
        elif isinstance(item, tuple | list):
            facts.append(len(item))
            found.append(type(item)(_unwrap(item, facts, in_shapes)))
        else:
            facts.append((type(item), item))
            found.append(item)
    return found


def _wrap(out: Any, changed: Sequence[Any], given: Sequence[Any]) -> Any:
    """New shape tensors; for what was changed in place, the one in `changed` that stands for it."""
    if isinstance(out, tuple | list):
        return type(out)(_wrap(item, changed, given) for item in out)
    if not isinstance(out, Tensor):
        return out
    for tensor, inner in zip(changed, given, strict=False):
        if inner is out:
            return tensor
    return ShapeTensor(out)


def put_weights(model: nn.Module) -> None:
    """Replace the weights of a model on the meta device; call it inside the mode."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


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
    _seen: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict, repr=False)

    @property
    def peak(self) -> int:
        """Without the gradients."""
        return max((sum(pair) for front in self.fronts.values() for pair in front), default=0)

    def count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, known: _Known | None) -> None:
        made = [item for item in (out if isinstance(out, tuple | list) else (out,)) if isinstance(item, Tensor)]
        work = None if known is None else known.work.get(self.batch)
        if work is None:
            work = self._weigh(func, args, kwargs, out, made)
            if known is not None:
                known.work[self.batch] = work
        self.flops += work[0]
        self.fixed_moved += work[1]
        self.samples_moved += work[2]
        for tensor in made:
            self._see(tensor)

    def _weigh(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, made: Sequence[Tensor]) -> _Work:
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            return formula(*args, **kwargs, out_val=out), 0, 0
        if func.is_view:
            return 0, 0, 0
        sizes = [item.nbytes for item in (*args, *made) if isinstance(item, Tensor)]
        samples = sum(size for size in sizes if size % self.batch == 0)
        return 0, sum(sizes) - samples, samples

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Storages that are there before the pass: the weights."""
        for tensor in tensors:
            assert isinstance(tensor, ShapeTensor)
            storage = tensor.shapes.untyped_storage()
            self._seen[storage._cdata] = weakref.ref(storage)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self._seen:
            return
        self._add(num_bytes)

        def forget(_: object) -> None:
            self._add(-num_bytes)
            self._seen.pop(address, None)

        self._seen[address] = weakref.ref(storage, forget)

    def _add(self, num_bytes: int) -> None:
        if num_bytes % self.batch:
            self.fixed += num_bytes
        else:
            self.samples += num_bytes
        if num_bytes <= 0:
            return
        fixed, samples = self.fixed - self.gradients, self.samples
        front = self.fronts.setdefault(self.gradients, [])
        if not any(fixed <= most_fixed and samples <= most_samples for most_fixed, most_samples in front):
            front[:] = [pair for pair in front if pair[0] > fixed or pair[1] > samples]
            front.append((fixed, samples))


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
def tally_passes(model: nn.Module, mode: ShapeMode, *, batch: int = 1) -> Iterator[Tally]:
    """Count all that happens inside the block; the weights of `model` are shape tensors, and `mode` is on."""
    tally = Tally(batch)
    tally.ignore([*model.parameters(), *model.buffers()])

    def add_gradient(parameter: Tensor) -> None:
        assert parameter.grad is not None
        tally.gradients += parameter.grad.nbytes

    def attend(query: Tensor, key: Tensor, value: Tensor, *masks: Any, **options: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        return _FusedAttention.apply(query, key, value, tally)  # type: ignore[no-untyped-call]

    hooks = [
        parameter.register_post_accumulate_grad_hook(add_gradient)  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    # A function mode would be off while blocks are recomputed.
    own_attention = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = attend
    mode.tally = tally
    try:
        with without_collector():
            yield tally
    finally:
        mode.tally = None
        tally._seen.clear()
        nn.functional.scaled_dot_product_attention = own_attention
        for hook in hooks:
            hook.remove()
        for parameter in model.parameters():
            parameter.grad = None
