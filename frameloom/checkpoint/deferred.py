"""Tensors that remember what is to be done with them and do it when they are written.

A key map that splits, joins or re-orders tensors is written for tensors in memory. Given deferred ones it runs just
the same, on shapes alone; each result then reads its own sources, and no two results need to be in memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from frameloom.checkpoint.lazy_tensors import LazyTensors, PendingTensor
from frameloom.core.errors import CheckpointError

__all__ = ["DeferredTensor", "to_deferred", "to_pending"]

_LOOKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default)


class DeferredTensor(Tensor):
    """A tensor with a shape and a number format, and a function that makes its numbers."""

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
        likes = func(*tree_map(_to_like, args), **_without_device(tree_map(_to_like, named)))
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


def _without_device(named: dict[str, Any]) -> dict[str, Any]:
    return {**named, "device": torch.device("meta")} if named.get("device") is not None else named


def _run(func: Any, args: tuple[Any, ...], named: dict[str, Any], index: int | None = None) -> Tensor:
    result = func(*tree_map(_to_value, args), **tree_map(_to_value, named))
    made: Tensor = result if index is None else result[index]
    return made


def _to_value(value: Any) -> Any:
    return value.compute() if isinstance(value, DeferredTensor) else value


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
