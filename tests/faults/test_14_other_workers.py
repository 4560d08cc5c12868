"""Samples and pixels do not depend on the number of loader workers, before or after a resume."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import islice, product

import numpy as np
import pytest

from frameloom.data.order import plan as plans
from frameloom.training.feed import Feed, build_feed
from frameloom.training.train import train
from tests.faults.runs import digests, metrics

COUNTS = (0, 1, 2, 4)
HALF = 4


def read(feed: Feed, workers: int, position: tuple[int, int], steps: int) -> tuple[list[object], tuple[int, int]]:
    """Rows and hashes of the pixels of some steps, and the position after them."""
    found: list[object] = []
    source = replace(feed, workers=workers).steps(*position, 1)
    for batches, planned in islice(source, steps):
        position = planned.position
        for batch in batches:
            assert batch.pixels_BCFHW is not None
            found.append((batch.rows.tolist(), hashlib.sha256(batch.pixels_BCFHW.numpy().tobytes()).hexdigest()))
    source.close()
    return found, position


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([(0, 2), (2, 1)], id="some"),
        pytest.param(list(product(COUNTS, COUNTS)), id="all", marks=pytest.mark.stress),
    ],
)
@pytest.mark.timeout(900)
def test_the_same_rows_and_pixels_follow(world, tally, pairs):
    feed = build_feed(world.recipe("--data.frame_start", "random"), bad_clips=world.folder / "bad.jsonl")
    whole, _ = read(feed, 0, (0, 0), 2 * HALF)
    assert len({row for rows, _ in whole for row in rows}) > 2 * HALF
    for before, after in pairs:
        tally.inject()
        first, position = read(feed, before, (0, 0), HALF)
        second, _ = read(feed, after, position, HALF)
        assert first + second == whole, (before, after)


def test_an_order_from_a_global_generator_would_change(world, monkeypatch):
    """The control: the same reading twice, with the shuffle drawn from numpy's own state."""
    monkeypatch.setattr(plans, "key", lambda *key: int(np.random.randint(2**31)))
    found = []
    for _ in range(2):
        feed = build_feed(world.recipe(), bad_clips=world.folder / "bad.jsonl")
        found.append(read(feed, 0, (0, 0), HALF)[0])
    assert found[0] != found[1]


def test_a_run_may_change_its_workers_in_the_middle(world, tally):
    alone = train(world.recipe("--name", "alone"))
    train(world.recipe("--name", "mixed", "--train.steps", "2", "--data.workers", "2"))
    mixed = train(world.recipe("--name", "mixed"))
    tally.inject()
    assert digests(alone, 6) == digests(mixed, 6) and metrics(alone) == metrics(mixed)
