"""Activations in a buffer of host memory: its places, what happens when it is full, and equal gradients."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from frameloom.core.random import stream
from frameloom.training.memory.activation_offload import ALIGNMENT, MIN_BYTES, HostBuffer, Places, Waiting
from frameloom.training.memory.recompute import recompute_blocks

WIDTH, ROWS = 128, 256
INPUT_BYTES = 4 * WIDTH * ROWS  # of a block; above MIN_BYTES


class MeasuredPlaces(Places):
    used_bytes = peak_bytes = 0

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        found = super().take(num_bytes)
        if found is not None:
            self.used_bytes += found[1] - found[0]
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return found

    def give_back(self, start: int, stop: int) -> None:
        super().give_back(start, stop)
        self.used_bytes -= stop - start


class MeasuredBuffer(HostBuffer):
    def __init__(self, max_bytes: int, *, pin_memory: bool) -> None:
        super().__init__(max_bytes, pin_memory=pin_memory)
        self.places: MeasuredPlaces = MeasuredPlaces(max_bytes)
        self.num_stored = self.num_refused = 0

    def store(self, saved: Tensor) -> Waiting | None:
        waiting = super().store(saved)
        self.num_stored += waiting is not None
        self.num_refused += waiting is None
        return waiting


def test_places_never_overlap_and_all_come_back() -> None:
    dice, places = random.Random(0), MeasuredPlaces(100 * ALIGNMENT)
    taken: list[tuple[int, int]] = []
    refused = 0
    for _ in range(2000):
        if taken and dice.random() < 0.5:
            places.give_back(*taken.pop(dice.randrange(len(taken))))
            continue
        found = places.take(dice.randint(1, 20 * ALIGNMENT))
        if found is None:
            refused += 1
        else:
            assert found[0] % ALIGNMENT == 0 and 0 <= found[0] < found[1] <= places.max_bytes
            assert all(found[1] <= start or stop <= found[0] for start, stop in taken)
            taken.append(found)
        assert places.used_bytes == sum(stop - start for start, stop in taken) <= places.max_bytes
    assert refused > 0 and places.peak_bytes <= places.max_bytes
    for place in taken:
        places.give_back(*place)
    assert places.used_bytes == 0
    # All of it is one place again.
    assert places.take(places.max_bytes) == (0, places.max_bytes)
    assert places.take(1) is None


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=stream(seed, "buffer")))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x)) * table


def run(num_blocks: int, buffer: MeasuredBuffer | None, seed: int = 0) -> tuple[list[Tensor], int]:
    """All gradients, and bytes in the buffer between the passes."""
    blocks = [Block(index + seed) for index in range(num_blocks)]
    recompute_blocks(blocks, buffer=buffer)
    x = torch.randn(ROWS, WIDTH, generator=stream(0, "buffer input")).requires_grad_()
    table = torch.randn(ROWS, WIDTH, generator=stream(1, "buffer input"))
    first = x * 1
    for block in blocks:
        first = block(first, table)
    held = 0 if buffer is None else buffer.places.used_bytes
    first.square().sum().backward()
    grads = [parameter.grad for block in blocks for parameter in block.parameters()]
    assert x.grad is not None and all(grad is not None for grad in grads)
    return [x.grad, *(grad for grad in grads if grad is not None)], held


def equal(ours: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, others, strict=True))


def test_what_blocks_are_given_waits_in_the_buffer_and_comes_back_to_the_bit() -> None:
    assert INPUT_BYTES > MIN_BYTES
    expected, _ = run(5, None)
    buffer = MeasuredBuffer(5 * INPUT_BYTES, pin_memory=False)
    found, held = run(5, buffer)
    assert equal(found, expected)
    # The inputs alone: the table belongs to all blocks and has no gradient.
    assert held == 5 * INPUT_BYTES and buffer.num_stored == 5 and buffer.num_refused == 0
    assert buffer.places.used_bytes == 0
    assert not equal(run(5, None, seed=9)[0], expected)


def test_a_full_buffer_leaves_the_rest_where_it_is() -> None:
    expected, _ = run(5, None)
    buffer = MeasuredBuffer(2 * INPUT_BYTES + INPUT_BYTES // 2, pin_memory=False)
    found, held = run(5, buffer)
    assert equal(found, expected)
    assert held == 2 * INPUT_BYTES and (buffer.num_stored, buffer.num_refused) == (2, 3)


def test_a_buffer_serves_step_after_step_without_growing() -> None:
    buffer = MeasuredBuffer(3 * INPUT_BYTES, pin_memory=False)
    for step in range(4):
        assert equal(run(3, buffer)[0], run(3, None)[0])
        assert buffer.num_stored == 3 * (step + 1)
    assert buffer.places.peak_bytes == 3 * INPUT_BYTES and buffer.num_refused == 0


def test_a_forward_without_a_backward_gives_its_places_back() -> None:
    buffer, block = MeasuredBuffer(3 * INPUT_BYTES, pin_memory=False), Block(0)
    x = torch.randn(ROWS, WIDTH, generator=stream(0, "buffer input")).requires_grad_()
    with buffer.keeping([x]):
        y = checkpoint(block, x, torch.ones(ROWS, WIDTH), use_reentrant=False)
    assert buffer.places.used_bytes == INPUT_BYTES
    del y
    assert buffer.places.used_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.uint8])
def test_every_number_format_and_layout_comes_back(dtype: torch.dtype) -> None:
    buffer = HostBuffer(4 * ROWS * WIDTH * 16, pin_memory=False)
    saved = (100 * torch.rand(3, ROWS, WIDTH, generator=stream(0, "buffer dtype"))).to(dtype).transpose(0, 2)
    waiting, other = buffer.store(saved[..., 0]), buffer.store(saved)
    assert waiting is not None and other is not None
    assert torch.equal(buffer.restore(waiting), saved[..., 0])
    assert torch.equal(buffer.restore(other), saved)
