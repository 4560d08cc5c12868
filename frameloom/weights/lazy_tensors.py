"""Lazy tensors: described first and read one at a time, so that a whole model never has to fit in memory.

A key map that splits, joins or re-orders tensors is written for tensors in memory. Given deferred ones it runs just
the same, on shapes alone; each result then reads its own sources, and no two results need to be in memory together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from frameloom.core.errors import CheckpointError

# Operations that look at numbers.
_LOOKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default)


@dataclass(frozen=True)
class PendingTensor:
    """One tensor before it is read; each call of `load` reads it again, into new memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name; `lazy[name]` reads one and keeps nothing, `pending` describes all of them without reading.

    `tied` names stand for a tensor that is kept under another name. `metadata` are the notes of the file.
    """

    pending: dict[str, PendingTensor]
    tied: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.pending[self.tied.get(name, name)].load()

    def __iter__(self) -> Iterator[str]:
        yield from self.pending
        yield from self.tied

    def __len__(self) -> int:
        return len(self.pending) + len(self.tied)

    def __contains__(self, name: object) -> bool:
        """Without reading the tensor, as the mapping's own answer would."""
        return name in self.pending or name in self.tied

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors; a tied one counts once."""
        return sum(one.num_bytes for one in self.pending.values())

    def untied(self) -> LazyTensors:
        """The same names, each with its own tensor."""
        copies = {name: self.pending[kept] for name, kept in self.tied.items()}
        return replace(self, pending=self.pending | copies, tied={})


def defer_tensors(tensors: Mapping[str, Tensor]) -> LazyTensors:
    """Tensors that are already in memory, in the form that writers take."""
    if isinstance(tensors, LazyTensors):
        return tensors
    return LazyTensors(
        {name: PendingTensor(tensor.dtype, tuple(tensor.shape), tensor.detach) for name, tensor in tensors.items()}
    )


def rename_tensors(tensors: LazyTensors, rename: Callable[[str], str], *, where: str) -> LazyTensors:
    """Every name through `rename`; CheckpointError when two tensors end up with one name."""
    names: dict[str, str] = {}
    olds: dict[str, str] = {}
    for name in tensors:
        new = names[name] = rename(name)
        if not new or new in olds:
            clash = f"as '{olds[new]}' is" if new else "which is no name"
            raise CheckpointError(f"{where}: '{name}' would be renamed to '{new}', {clash}; strip less")
        olds[new] = name
    return replace(
        tensors,
        pending={names[name]: pending for name, pending in tensors.pending.items()},
        tied={names[name]: names[kept] for name, kept in tensors.tied.items()},
    )


def cast_tensors(tensors: LazyTensors, dtype: torch.dtype) -> LazyTensors:
    """Floating-point tensors as `dtype`; whole numbers, booleans and complex numbers stay as they are."""
    pending = {
        name: replace(one, dtype=dtype, load=partial(_cast, name, one, dtype))
        if one.dtype.is_floating_point and one.dtype != dtype
        else one
        for name, one in tensors.pending.items()
    }
    return replace(tensors, pending=pending)


def _cast(name: str, pending: PendingTensor, dtype: torch.dtype) -> Tensor:
    source = pending.load()
    result = source.to(dtype)
    # Infinities that were there before are no fault of the cast.
    if (num_lost := int(result.isinf().sum()) - int(source.isinf().sum())) > 0:
        raise CheckpointError(
            f"{name}: {num_lost} of its numbers are too large for {dtype} (largest: {float(source.abs().max()):.3g}); "
            "keep its dtype, or choose bf16 or fp32"
        )
    return result


class DeferredTensor(Tensor):
    """A tensor whose numbers a function makes."""

    like: Tensor
    compute: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, like: Tensor, compute: Callable[[], Tensor]) -> DeferredTensor:
        made: DeferredTensor = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=torch.device("cpu"),
            requires_grad=False,
        )
        made.like, made.compute = like, compute
        return made

    def __init__(self, like: Tensor, compute: Callable[[], Tensor]) -> None:
        """Nothing is left to do, but without it the arguments would go to Tensor's own."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func._schema.is_mutable:
            raise TypeError(f"{func}: a key map must not change tensors in place")
        if func in _LOOKS:
            raise TypeError(f"{func}: a key map may depend on shapes, not on the numbers of a tensor")
        meta = {"device": torch.device("meta")} if named.get("device") is not None else {}
        likes = func(*tree_map(_to_like, args), **{**tree_map(_to_like, named), **meta})
        if isinstance(likes, Tensor):
            return cls(likes, partial(_run, func, args, named))
        if isinstance(likes, list | tuple):
            return [
                cls(like, partial(_run, func, args, named, index=index)) if isinstance(like, Tensor) else like
                for index, like in enumerate(likes)
            ]
        return likes


def _to_like(value: Any) -> Any:
    if isinstance(value, DeferredTensor):
        return value.like
    return value.to("meta") if isinstance(value, Tensor) else value


def _run(func: Any, args: tuple[Any, ...], named: dict[str, Any], index: int | None = None) -> Tensor:
    def compute(value: Any) -> Any:
        return value.compute() if isinstance(value, DeferredTensor) else value

    result = func(*tree_map(compute, args), **tree_map(compute, named))
    made: Tensor = result if index is None else result[index]
    return made


def to_deferred(tensors: LazyTensors) -> dict[str, Tensor]:
    """Every tensor (tied ones too) as a deferred one that reads itself."""
    whole = tensors.untied()
    return {
        name: DeferredTensor(torch.empty(one.shape, dtype=one.dtype, device="meta"), one.load)
        for name, one in whole.pending.items()
    }


def to_pending(tensors: Mapping[str, Tensor], *, where: str) -> LazyTensors:
    """What a key map gave, ready to be written; real tensors among them stay in memory."""
    pending = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(f"{where}: '{name}' got no numbers; the weights do not cover the whole model")
        load = tensor.compute if isinstance(tensor, DeferredTensor) else tensor.detach
        pending[name] = PendingTensor(tensor.dtype, tuple(tensor.shape), load)
    return LazyTensors(pending)
