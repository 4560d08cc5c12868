"""Reading ahead changes neither order nor content, and nothing keeps running behind it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from frameloom.data.buckets.policy import Bucket
from frameloom.data.loading.batch import Batch, Crops
from frameloom.data.loading.prefetch import map_tensors, prefetch, prefetch_to_device

BUCKET = Bucket(0, "64px", 1, "1:1", 64, 64, 2)


def make_batch(index: int) -> Batch:
    rows = np.array([index], dtype=np.int64)
    pixels = torch.full((1, 3, 1, 4, 4), index, dtype=torch.uint8)
    pair = torch.tensor([[index, 0]])
    return Batch(0, index, BUCKET, rows, rows, ["text"], pixels_BCFHW=pixels, crops=Crops(pair, pair, pair))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_items_come_in_order_and_all_of_them(depth: int) -> None:
    assert list(prefetch(range(50), depth=depth)) == list(range(50))
    assert list(prefetch_to_device((make_batch(n) for n in range(0)), torch.device("cpu"), depth=depth)) == []


def test_a_few_are_read_ahead_and_no_more() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for number in itertools.count():
            made.append(number)
            yield number

    stream = prefetch(source(), depth=3)
    assert next(stream) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3, 4]  # one taken, three waiting, one in the hands of the thread
    stream.close()


def test_an_error_comes_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("in the source")

    stream = prefetch(source(), depth=4)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(KeyError, match="in the source"):
        next(stream)


def test_closing_stops_the_thread_and_closes_the_source() -> None:
    closed = threading.Event()
    before = threading.active_count()

    def source() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            closed.set()

    stream = prefetch(source(), depth=2)
    assert next(stream) == 0
    stream.close()
    assert closed.is_set()
    assert threading.active_count() == before


def test_every_tensor_of_a_batch_is_reached() -> None:
    batch = make_batch(3)
    changed = map_tensors(("plan", batch), lambda tensor: tensor + 1)[1]
    assert changed.pixels_BCFHW.unique().tolist() == [4]
    assert changed.crops.top_left_B2.tolist() == [[4, 1]]
    assert changed.rows is batch.rows and changed.bucket is batch.bucket
    assert batch.pixels_BCFHW.unique().tolist() == [3]
    untouched = Batch(0, 0, BUCKET, batch.rows, batch.rows, [])
    assert map_tensors(untouched, lambda tensor: tensor + 1).pixels_BCFHW is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_the_device() -> None:
    device = torch.device("cuda")
    found = list(prefetch_to_device((make_batch(n) for n in range(20)), device, depth=3))
    assert all(batch.pixels_BCFHW.is_cuda for batch in found)
    assert [int(batch.pixels_BCFHW.float().mean()) for batch in found] == list(range(20))


def test_depth_must_be_positive() -> None:
    with pytest.raises(ValueError, match="depth is 0"):
        next(prefetch([1], depth=0))
