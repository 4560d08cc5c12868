"""Offloading of saved activations to host memory: a buffer of fixed size, pinned for a GPU and reused.

A tensor that finds no room stays on the device: a small buffer costs memory there, never an error. Copies to the host
run beside the computation, on a stream of their own; those back come in the order of the computation.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# Places start at multiples of this, so that every dtype fits.
ALIGNMENT = 512
# Smaller tensors (modulation vectors, noise levels) are shared by all blocks and not worth a copy for each.
MIN_BYTES = 64 * 1024


class HostBuffer:
    """Make one for all blocks of a model. The memory is taken when it is first needed."""

    def __init__(self, max_bytes: int, *, pin_memory: bool) -> None:
        self.places = Places(max_bytes)
        self._pin_memory = pin_memory
        self._block: Tensor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def keeping(self, inputs: Collection[Any]) -> Iterator[None]:
        """Inside, those of `inputs` that get a gradient and are saved for it wait here. Others belong to all blocks
        (position tables, masks) and are on the device anyway."""
        wanted = {x.data_ptr() for x in inputs if isinstance(x, Tensor) and x.requires_grad and x.nbytes >= MIN_BYTES}

        def pack(saved: Tensor) -> Tensor | Waiting:
            waiting = self.store(saved) if saved.data_ptr() in wanted else None
            return saved if waiting is None else waiting

        with saved_tensors_hooks(pack, self.restore):
            yield

    def store(self, saved: Tensor) -> Waiting | None:
        """A copy; None when there is no room."""
        found = self.places.take(saved.nbytes)
        if found is None:
            return None
        if self._block is None:
            self._block = torch.empty(self.places.max_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
        place = self._block[found[0] : found[0] + saved.nbytes].view(saved.dtype).view(saved.shape)
        self._copy_out(place, saved)
        waiting = Waiting(place, saved.device)
        weakref.finalize(waiting, self.places.give_back, *found)
        return waiting

    def restore(self, packed: Tensor | Waiting) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.device.type == "cuda":
            torch.cuda.current_stream(packed.device).wait_stream(self._stream(packed.device))
            return packed.place.to(packed.device, non_blocking=True)
        # The place may be given to another tensor while this one is in use.
        return packed.place.clone()

    def _copy_out(self, place: Tensor, saved: Tensor) -> None:
        if saved.device.type != "cuda":
            place.copy_(saved)
            return
        # Behind all that was computed so far: the tensor itself, and copies back from a place that is used again.
        stream = self._stream(saved.device)
        stream.wait_stream(torch.cuda.current_stream(saved.device))
        with torch.cuda.stream(stream):
            place.copy_(saved, non_blocking=True)
        saved.record_stream(stream)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class Waiting:
    """A tensor in the buffer; its place is free again when nothing holds this any more."""

    def __init__(self, place: Tensor, device: torch.device) -> None:
        self.place, self.device = place, device


class Places:
    """Which parts of a block of memory are taken. First fit; neighbours that are given back are joined."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes // ALIGNMENT * ALIGNMENT
        self._free: list[tuple[int, int]] = [(0, self.max_bytes)] if self.max_bytes else []

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        """Start and stop of a place that is large enough; None when there is none."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                return start, start + size
        return None

    def give_back(self, start: int, stop: int) -> None:
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index, start = index - 1, self._free.pop(index - 1)[0]
        self._free.insert(index, (start, stop))
