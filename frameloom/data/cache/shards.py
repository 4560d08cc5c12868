"""Tensors of many samples in one safetensors file: packed by a writer, read as mapped memory.

A shard holds stacks; a stack holds tensors by name, one slot per sample. In a ragged stack a sample keeps only what
comes before its trailing zeros along its first dim, so the padding of captions costs no space and comes back exactly.
"""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from frameloom.core.errors import CacheError

SHARD_BYTES = 128 * 2**20
REBUILD = "encode again with: frameloom data cache RECIPE"
# A mapped file costs address space, not memory; the system allows some 65,000 mappings.
_MAX_OPEN_SHARDS = 4096


class Stored(NamedTuple):
    """One tensor of one sample as it lies in a shard; `full` is its first size before trailing zeros were cut."""

    tensor: Tensor
    full: int

    def restore(self) -> Tensor:
        missing = self.full - len(self.tensor)
        if not missing:
            return self.tensor
        return torch.cat([self.tensor, self.tensor.new_zeros((missing, *self.tensor.shape[1:]))])


def trim(tensor: Tensor) -> Stored:
    """Cut trailing zeros along the first dim; only zeros that come back to the bit are cut, so no negative ones."""
    kept = tensor != 0
    if tensor.is_floating_point():
        kept = kept | torch.signbit(tensor)
    used = kept.reshape(len(tensor), math.prod(tensor.shape[1:])).any(1).nonzero()
    length = int(used[-1]) + 1 if len(used) else 0
    return Stored(tensor[:length].contiguous(), len(tensor))


def checksum(sample: Mapping[str, Stored]) -> int:
    """CRC-32 over the stored bytes of a sample, in the order of names."""
    value = 0
    for name in sorted(sample):
        flat = sample[name].tensor.contiguous().reshape(-1)
        value = zlib.crc32(flat.view(torch.uint8).numpy().data, value)
    return value


@dataclass
class Group:
    """Samples that are committed together. `made_by` names the fingerprint that all of them share."""

    made_by: str
    ragged: bool = False
    entries: list[dict[str, Any]] = field(default_factory=list)
    num_bytes: int = 0
    _stacks: dict[str, list[Mapping[str, Stored]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entry: Mapping[str, Any], stack: str, tensors: Mapping[str, Tensor]) -> None:
        """`entry` says what the sample is, in the columns of the index."""
        cut = trim if self.ragged else lambda tensor: Stored(tensor.contiguous(), len(tensor))
        self.add_stored(entry, stack, {name: cut(tensor) for name, tensor in tensors.items()})

    def add_stored(self, entry: Mapping[str, Any], stack: str, sample: Mapping[str, Stored]) -> None:
        slots = self._stacks.setdefault(stack, [])
        location = {"stack": stack, "slot": len(slots), "crc": checksum(sample)}
        self.entries.append({**entry, "made_by": self.made_by, **location})
        slots.append(sample)
        self.num_bytes += sum(part.tensor.numel() * part.tensor.element_size() for part in sample.values())

    def add_empty(self, entry: Mapping[str, Any]) -> None:
        """A sample without tensors: a clip that could not be read."""
        self.entries.append({**entry, "made_by": self.made_by, "stack": None, "slot": -1, "crc": 0})

    def clear(self) -> None:
        """Begin anew with the same fingerprint."""
        self.entries, self.num_bytes, self._stacks = [], 0, {}

    def pack(self) -> bytes:
        """The bytes of the shard; they follow from the samples and their order alone."""
        tensors: dict[str, Tensor] = {}
        for stack, samples in self._stacks.items():
            for part in samples[0]:
                name, parts = f"{stack}/{part}", [sample[part] for sample in samples]
                if not self.ragged:
                    tensors[name] = torch.stack([one.tensor for one in parts])
                    continue
                tensors[name] = torch.cat([one.tensor for one in parts])
                tensors[f"{name}/starts"] = torch.tensor([0, *(len(one.tensor) for one in parts)]).cumsum(0)
                tensors[f"{name}/full"] = torch.tensor([one.full for one in parts])
        return bytes(save(tensors))


# By the name of a tensor: its values, and in a ragged stack where samples start and their full sizes.
_Stack = dict[str, dict[str, Tensor]]


class ShardReader:
    """Samples from the shards of one folder. Pages are shared by all processes of the machine that map a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: OrderedDict[str, dict[str, _Stack]] = OrderedDict()

    def sample(self, shard: str, stack: str, slot: int, crc: int | None) -> dict[str, Stored]:
        """One sample; with `crc` its bytes are checked. CacheError if the shard is damaged."""
        try:
            found = {}
            for name, parts in self._stacks(shard)[stack].items():
                if "starts" in parts:
                    first, last = parts["starts"][slot : slot + 2].tolist()
                    found[name] = Stored(parts["values"][first:last], int(parts["full"][slot]))
                else:
                    found[name] = Stored(parts["values"][slot], len(parts["values"][slot]))
        except (KeyError, IndexError, ValueError) as error:
            raise CacheError(f"{self.folder / shard}: lacks slot {slot} of {stack}; {REBUILD}") from error
        if crc is not None and checksum(found) != crc:
            raise CacheError(f"{self.folder / shard}: slot {slot} of {stack} is damaged; {REBUILD}")
        return found

    def gather(self, shard: str, stack: str, slots: NDArray[np.integer]) -> dict[str, Tensor]:
        """Copies of several samples of a stack that is not ragged, in the order of `slots`; nothing is checked."""
        index = torch.from_numpy(slots.astype(np.int64))
        return {name: parts["values"].index_select(0, index) for name, parts in self._stacks(shard)[stack].items()}

    def _stacks(self, shard: str) -> dict[str, _Stack]:
        if (stacks := self._open.get(shard)) is not None:
            return stacks
        stacks, path = {}, self.folder / shard
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  the handle is no dictionary
                    stack, part, *kind = name.split("/")
                    parts = stacks.setdefault(stack, {}).setdefault(part, {})
                    parts[kind[0] if kind else "values"] = file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CacheError(f"{path}: missing or damaged ({error}); {REBUILD}") from error
        self._open[shard] = stacks
        if len(self._open) > _MAX_OPEN_SHARDS:
            self._open.popitem(last=False)
        return stacks

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)
