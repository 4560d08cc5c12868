"""Tensors that are described at once and read one at a time, so that a whole model never has to fit in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from frameloom.core.errors import CheckpointError

__all__ = ["LazyTensors", "PendingTensor", "cast_tensors", "defer_tensors", "rename_tensors"]


@dataclass(frozen=True)
class PendingTensor:
    """One tensor before it is read; each call of `load` reads it again, into memory of its own."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name; `lazy[name]` reads one and keeps nothing, `pending` describes all of them without reading.

    `tied` names stand for a tensor that is kept under another name. `metadata` are the notes of the file.
    """

    def __init__(
        self,
        pending: Mapping[str, PendingTensor],
        *,
        tied: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.pending = dict(pending)
        self.tied = dict(tied or {})
        self.metadata = dict(metadata or {})

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
        """The same names, each with a tensor of its own."""
        copies = {name: self.pending[kept] for name, kept in self.tied.items()}
        return LazyTensors(self.pending | copies, metadata=self.metadata)


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
    return LazyTensors(
        {names[name]: pending for name, pending in tensors.pending.items()},
        tied={names[name]: names[kept] for name, kept in tensors.tied.items()},
        metadata=tensors.metadata,
    )


def cast_tensors(tensors: LazyTensors, dtype: torch.dtype) -> LazyTensors:
    """Floating-point tensors as `dtype`; whole numbers, booleans and complex numbers stay as they are."""
    pending = {
        name: replace(one, dtype=dtype, load=partial(_cast, name, one, dtype))
        if one.dtype.is_floating_point and one.dtype != dtype
        else one
        for name, one in tensors.pending.items()
    }
    return LazyTensors(pending, tied=tensors.tied, metadata=tensors.metadata)


def _cast(name: str, pending: PendingTensor, dtype: torch.dtype) -> Tensor:
    source = pending.load()
    result = source.to(dtype)
    # Infinities that were there before are no fault of the cast.
    if (num_lost := int(result.isinf().sum()) - int(source.isinf().sum())) > 0:
        raise CheckpointError(
            f"{name}: {num_lost} of its numbers are too large for {dtype} (largest: {float(source.abs().max()):.3g}); "
            "keep the number format, or choose bf16 or fp32"
        )
    return result
