"""Offloading of optimizer state to host memory: a step brings it to the device a part at a time.

Weights and gradients stay where they are, so nothing else knows of it. On a GPU the state of the next part arrives, and
that of the last one leaves, on a stream of their own while a part is computed on; places in pinned host memory are
taken once and kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from frameloom.core.errors import ConfigError
from frameloom.training.optim.optimizer import GROUP_STATE, allocate_state

PART_BYTES = 256 * 2**20
"""of the weights that are moved at a time; with AdamW their state is twice as large, and three parts may be there"""
# Pinned memory comes in powers of two, so tensors share pieces of that size.
_BLOCK_BYTES = 256 * 2**20
_ALIGNMENT = 512
# Counters and small tables stay on the device.
_MIN_NUMBERS = 1024


def apply_offload(optimizer: Optimizer, device: torch.device) -> None:
    """What a recipe's `optim.offload` asks for."""
    if device.type == "cpu":
        raise ConfigError(
            "optim.offload is true, but the run computes on the CPU, whose memory is the host's; set it to false, or "
            "choose a GPU with train.device"
        )
    offload_state(optimizer, device)


def offload_state(optimizer: Optimizer, device: torch.device, part_bytes: int = PART_BYTES) -> HostState:
    """Give an optimizer of `build_optimizer` its state in host memory, for good. Each part takes a step of its own, so
    it must treat weights one by one: all but prodigy."""
    host = HostState(optimizer, device, part_bytes)
    host.allocate()

    def step(own: Optimizer) -> None:
        host.step(own)

    # Its hooks run around the whole step, as they do for the optimizer's own.
    optimizer.step = partial(Optimizer.profile_hook_step(step), optimizer)  # type: ignore[assignment, method-assign]
    return host


class Part(NamedTuple):
    """Some weights of one parameter group."""

    group: int
    params: list[nn.Parameter]
    names: list[str]


class HostState:
    """The state of one optimizer in host memory, and its way to the device and back."""

    def __init__(self, optimizer: Optimizer, device: torch.device, part_bytes: int) -> None:
        self.optimizer, self.device, self.part_bytes = optimizer, device, part_bytes
        is_cuda = device.type == "cuda"
        self.arena = PinnedArena(pin_memory=is_cuda)
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        # The step itself; its hooks belong to the whole of it and run once.
        self._move = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
        self._home: dict[tuple[nn.Parameter, str], Tensor] = {}

    def allocate(self) -> None:
        """State as it is before the first step, part by part: it may not fit on the device as a whole."""
        counters: dict[int, dict[str, Any]] = {}
        for part in self._parts():
            with self._only(part, counters):
                allocate_state(self.optimizer)
            self._send(part)
        self._finish(counters)

    def step(self, optimizer: Optimizer) -> None:
        parts = self._parts()
        counters: dict[int, dict[str, Any]] = {}
        arriving = self._bring(parts[0])
        for number, part in enumerate(parts):
            if self._stream is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_stream(self._stream)
                for tensor in arriving:
                    tensor.record_stream(current)
            if number + 1 < len(parts):
                arriving = self._bring(parts[number + 1])
            with self._only(part, counters):
                self._move(optimizer)
            self._send(part)
        self._finish(counters)

    def _parts(self) -> list[Part]:
        parts: list[Part] = []
        for place, group in enumerate(self.optimizer.param_groups):
            size = self.part_bytes
            for param, name in zip(group["params"], group["param_names"], strict=True):
                if size + param.nbytes > self.part_bytes:
                    parts.append(Part(place, [], []))
                    size = 0
                parts[-1].params.append(param)
                parts[-1].names.append(name)
                size += param.nbytes
        return parts

    @contextmanager
    def _only(self, part: Part, counters: dict[int, dict[str, Any]]) -> Iterator[None]:
        """Inside, the optimizer has no other weights than these; what it counts in their group goes to `counters`."""
        whole = self.optimizer.param_groups
        group = {**whole[part.group], "params": part.params, "param_names": part.names}
        self.optimizer.param_groups = [group]
        try:
            yield
            counters[part.group] = {key: group[key] for key in GROUP_STATE if key in group}
        finally:
            self.optimizer.param_groups = whole

    def _bring(self, part: Part) -> Sequence[Tensor]:
        """Start to copy the state of a part to the device."""
        brought = []
        with self._beside():
            for param in part.params:
                state = self.optimizer.state.get(param, {})
                for key in state:
                    if (home := self._home.get((param, key))) is not None:
                        state[key] = home.to(self.device, non_blocking=True, copy=True)
                        brought.append(state[key])
        return brought

    def _send(self, part: Part) -> None:
        """Start to copy the state of a part home."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._beside():
            for param in part.params:
                state = self.optimizer.state.get(param, {})
                for key, tensor in state.items():
                    if not isinstance(tensor, Tensor) or tensor.numel() < _MIN_NUMBERS:
                        continue
                    if (param, key) not in self._home:
                        self._home[param, key] = self.arena.allocate_like(tensor)
                    state[key] = self._home[param, key].copy_(tensor, non_blocking=True)
                    if self._stream is not None:
                        tensor.record_stream(self._stream)

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _finish(self, counters: dict[int, dict[str, Any]]) -> None:
        """Counters change only now, so that all parts of a group see the same ones; then state may be read."""
        for place, values in counters.items():
            self.optimizer.param_groups[place].update(values)
        if self._stream is not None:
            self._stream.synchronize()


class PinnedArena:
    """Host memory for tensors that never go away, in few large pieces."""

    def __init__(self, *, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._block = torch.empty(0, dtype=torch.uint8)

    def allocate_like(self, tensor: Tensor) -> Tensor:
        size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._block):
            num_bytes = max(size, _BLOCK_BYTES) if self._pin_memory else size
            self._block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
        taken, self._block = self._block[: tensor.nbytes], self._block[size:]
        return taken.view(tensor.dtype).view(tensor.shape)
