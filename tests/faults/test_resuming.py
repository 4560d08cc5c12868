"""Resumed runs equal one never stopped, to the bit; data that changed is refused, and every sample comes once."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from frameloom.core.errors import CheckpointError
from frameloom.core.random import numpy_stream
from frameloom.data.order import plan as plans
from frameloom.data.order.plan import BatchPlan, plan_epoch
from frameloom.data.order.rank_assignment import PlannedStep, RankAssignment
from frameloom.training.feed import Feed, build_feed
from frameloom.training.run import resuming
from frameloom.training.run.resuming import restore
from frameloom.training.step import Stepper
from frameloom.training.tasks import noising as draws
from frameloom.training.train import train
from tests.faults.runs import digests, losses, metrics, stop_after
from tests.faults.trainers import copy, go_on, has_equal_tensors, is_equal

# Rows 12 and 13: A run that was stopped and resumed, at any step and any number of times, equals one never stopped,
# to the bit.

STEPS = 20


def test_12_resuming_at_every_step_gives_the_same_next_step(start, tally):
    """Losses, rates, rows, weights, average and optimizer of the step after, from each of 20 states in turn.

    A state holds all that a step depends on, so equal next steps mean equal runs to the end.
    """
    trainer = start()
    first = copy(trainer.snapshot())
    whole = go_on(trainer, STEPS)
    states = [first, *(state for _, _, state in whole)]
    other = start()  # its own weights and optimizer, used by no step so far
    for step in (*range(STEPS - 1, -1, -1), 7):
        tally.inject()
        restore(other, copy(states[step]))
        ((values, rows, state),) = go_on(other, 1)
        assert (values, rows) == whole[step][:2] and is_equal(state, states[step + 1])
    assert not is_equal(states[3], states[4])


def test_12_without_the_optimizer_the_next_step_would_differ(start, monkeypatch):
    """The control."""
    trainer = start()
    whole = go_on(trainer, 4)
    other = start()
    monkeypatch.setattr(Stepper, "load", lambda *given: None)
    restore(other, copy(whole[2][2]))
    ((_, rows, state),) = go_on(other, 1)
    assert rows == whole[3][1] and not is_equal(state, whole[3][2])


@pytest.mark.parametrize(("task", "steps"), [("denoiser", (0, 9)), ("autoencoder", (5,))])
def test_12_whole_runs_resume_from_their_files(world, tally, task, steps):
    recipe = world.recipe("--train.steps", "11", "--train.save_every", "1", "--train.keep", "20", task=task)
    run = train(recipe)
    for step in steps:
        again = world.folder / f"again-{step}"
        stop_after(run, step, again / "run")
        tally.inject()
        train(recipe.model_copy(update={"run": recipe.run.model_copy(update={"folder": str(again)})}))
        assert digests(again / "run", 11) == digests(run, 11)
        assert metrics(again / "run") == metrics(run)


def test_13_every_sample_comes_once_an_epoch_however_often_the_run_resumes(start, tally):
    """Row 13: five resumes in one epoch, and one exactly at its end."""
    rows, trainer, state = [], start(), None
    length = trainer.feed.plan(0).num_microbatches
    assert length >= 9
    whole = go_on(start(), 2 * length)
    for steps in (1, 2, 1, 3, 1, length - 8, length):
        if state is not None:
            trainer = start()
            restore(trainer, state)
            tally.inject()
        part = go_on(trainer, steps)
        rows += [found for _, found, _ in part]
        state = part[-1][2]
    assert rows == [found for _, found, _ in whole] and is_equal(state, whole[-1][2])
    for epoch in range(2):
        seen = Counter(row for found in rows[epoch * length : (epoch + 1) * length] for row in found)
        assert set(seen.values()) == {1} and len(seen) == len(trainer.feed.manifest)
    assert rows[:length] != rows[length:]


# Row 14: Samples and pixels do not depend on the number of loader workers, before or after a resume.

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
def test_14_the_same_rows_and_pixels_follow(world, tally, pairs):
    feed = build_feed(world.recipe("--data.frame_start", "random"), bad_clips=world.folder / "bad.jsonl")
    whole, _ = read(feed, 0, (0, 0), 2 * HALF)
    assert len({row for rows, _ in whole for row in rows}) > 2 * HALF
    for before, after in pairs:
        tally.inject()
        first, position = read(feed, before, (0, 0), HALF)
        second, _ = read(feed, after, position, HALF)
        assert first + second == whole, (before, after)


def test_14_an_order_from_a_global_generator_would_change(world, monkeypatch):
    """The control: the same reading twice, with the shuffle drawn from numpy's own state."""
    monkeypatch.setattr(plans, "key", lambda *key: int(np.random.randint(2**31)))
    found = []
    for _ in range(2):
        feed = build_feed(world.recipe(), bad_clips=world.folder / "bad.jsonl")
        found.append(read(feed, 0, (0, 0), HALF)[0])
    assert found[0] != found[1]


def test_14_a_run_may_change_its_workers_in_the_middle(world, tally):
    alone = train(world.recipe("--name", "alone"))
    train(world.recipe("--name", "mixed", "--train.steps", "2", "--data.workers", "2"))
    mixed = train(world.recipe("--name", "mixed"))
    tally.inject()
    assert digests(alone, 6) == digests(mixed, 6) and metrics(alone) == metrics(mixed)


# Rows 17 and 18: Draws from the global generators, by whomever, change nothing; and what must change something does.

NUM_TAKEN = 4


def stray() -> None:
    torch.rand(7)
    np.random.rand(3)
    random.random()


@pytest.mark.parametrize("when", ["before", "between", "seeded", "another loader"])
def test_17_stray_draws_change_nothing(start, tally, when):
    wanted = go_on(start(), NUM_TAKEN)
    tally.inject()
    if when == "seeded":
        torch.manual_seed(99)
        np.random.seed(99)
    if when == "before":
        stray()
    trainer = start()
    found = []
    for _ in range(NUM_TAKEN):
        if when == "between":
            stray()
        if when == "another loader":
            next(trainer.feed.steps(trainer.epoch, trainer.position, 1))
        found += go_on(trainer, 1)
    assert [step[:2] for step in found] == [step[:2] for step in wanted]
    assert has_equal_tensors(found[-1][2], wanted[-1][2])


def test_17_noise_from_the_global_generator_would_change(start, monkeypatch):
    """The control of stray draws: noise that comes from torch's own generator, as most trainers have it."""
    monkeypatch.setattr(draws, "key", lambda *key: int(torch.randint(2**31, ())))
    found = []
    for num_stray in (0, 7):
        trainer = start()
        torch.manual_seed(5)
        torch.rand(num_stray)
        found.append([step[0]["loss"] for step in go_on(trainer, NUM_TAKEN)])
    assert found[0] != found[1]


def test_18_another_seed_differs(start, tally):
    """Row 18: the control of every equality here."""
    first, second = go_on(start(), 2), go_on(start("--seed", "43"), 2)
    assert [step[0]["loss"] for step in first] != [step[0]["loss"] for step in second]
    assert not has_equal_tensors(first[-1][2], second[-1][2])
    tally.inject()


def test_18_a_resume_without_its_position_differs(start, monkeypatch, tally):
    whole = go_on(start(), 4)
    other = start()
    restore(other, copy(whole[1][2]))
    other.epoch, other.position = 0, 0
    assert [step[1] for step in go_on(other, 2)] != [step[1] for step in whole[2:]]
    tally.inject()


def test_18_a_shuffle_without_a_seed_differs(start, monkeypatch, tally):
    from frameloom.data.order import plan

    monkeypatch.setattr(plan, "key", lambda *key: int(np.random.randint(2**31)))
    orders = [[step[1] for step in go_on(start(), 4)] for _ in range(2)]
    assert orders[0] != orders[1]
    tally.inject()


# Row 25: Buckets of unequal size over several ranks: equal numbers of rounds, every sample once, no waiting for ever.
# Runs of two and three ranks over such buckets are in tests/distributed/test_equivalence.py.

TABLES = 500
WORLDS = (1, 2, 3)


def make_plan(number: int) -> tuple[BatchPlan, list[int]]:
    """A random table: up to six buckets, some with one clip, some with none; and the rows that have a bucket."""
    draw = numpy_stream(number, "bucket table")
    counts = draw.integers(0, 40, int(draw.integers(1, 7)))
    counts[int(draw.integers(len(counts)))] = 1
    assignment = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    sizes = draw.integers(1, 6, len(counts))
    plan = plan_epoch(assignment, sizes, sizes * 1.5, seed=number, epoch=0)
    return plan, list(range(len(assignment)))


def deal(plan: BatchPlan, world: int) -> list[list[list[tuple[int, bool]]]]:
    """For each rank, its micro-batches (and whether they are fillers) in each step."""

    def steps(assignment: RankAssignment) -> list[PlannedStep]:
        firsts = range(0, plan.num_microbatches, world)
        ends = [min(first + world, plan.num_microbatches) for first in firsts]
        return [PlannedStep(plan, *bounds, assignment=assignment) for bounds in zip(firsts, ends, strict=True)]

    return [[step.of_rank() for step in steps(RankAssignment(rank, world, world))] for rank in range(world)]


def find_faults(number: int) -> list[str]:
    plan, rows = make_plan(number)
    found = []
    for world in WORLDS:
        ranks = deal(plan, world)
        if len({tuple(len(step) for step in steps) for steps in ranks}) > 1:
            found.append(f"table {number}, {world} ranks: not as many rounds on all")
        used = Counter(
            int(row)
            for steps in ranks
            for step in steps
            for index, is_filler in step
            if not is_filler
            for row in plan.rows(index)
        )
        if used != Counter(rows):
            found.append(f"table {number}, {world} ranks: samples lost or taken twice")
    return found


def test_25_random_tables_are_shared_out_evenly(tally):
    for number in range(TABLES):
        tally.inject()
        assert find_faults(number) == []


def test_25_without_fillers_some_ranks_would_wait_for_a_round_that_never_comes(monkeypatch):
    """The control: the last round is dealt to those alone for whom there is something."""

    def deal_short(self: PlannedStep) -> list[tuple[int, bool]]:
        return [
            (index, False) for index in range(self.first + self.assignment.rank, self.end, self.assignment.num_ranks)
        ]

    monkeypatch.setattr(PlannedStep, "of_rank", deal_short)
    assert any("rounds" in fault for number in range(20) for fault in find_faults(number))


def test_25_ranks_that_all_take_everything_would_be_noticed(monkeypatch):
    """The control of the count of samples."""
    monkeypatch.setattr(PlannedStep, "of_rank", lambda self: [(index, False) for index in range(self.first, self.end)])
    assert any("twice" in fault for fault in find_faults(3))


# Row 26: Data that changed between a save and a resume is refused with what changed; a flag accepts it.

Change = Callable[[pl.DataFrame], pl.DataFrame]
CHANGES: dict[str, Change] = {
    "a clip removed": lambda table: table.slice(1),
    "rows in another order": lambda table: table.reverse(),
    "a caption edited": lambda table: table.with_columns(caption=pl.col("caption") + " today"),
    "a file edited": lambda table: table.with_columns(sha256=pl.lit("0" * 64)),
}


@pytest.fixture
def manifest(world) -> Path:
    path = shutil.copytree(world.shared / "data", world.folder / "data") / "manifest.parquet"
    train(world.recipe("--data.manifest", str(path), "--train.steps", "2"))
    return path


@pytest.mark.parametrize("what", CHANGES)
def test_26_it_is_refused(world, manifest, tally, what):
    CHANGES[what](pl.read_parquet(manifest)).write_parquet(manifest)
    tally.inject()
    with pytest.raises(CheckpointError, match="manifest has changed"):
        train(world.recipe("--data.manifest", str(manifest)))
    assert max(losses(world.folder / "run")) == 2


def test_26_a_flag_accepts_it(world, manifest, warm, tally):
    """The command says what changed, and goes on only when it is told to."""
    CHANGES["a clip removed"](pl.read_parquet(manifest)).write_parquet(manifest)
    words = ("train", str(world.folder / "recipe.yaml"), "--data.manifest", str(manifest))
    tally.inject()
    refused = warm.expect(warm.command(*words), 2)
    assert "--accept-data-change" in refused
    warm.expect(warm.command(*words, "--accept-data-change"))
    assert sorted(losses(world.folder / "run")) == [1, 2, 3, 4, 5, 6]


def test_26_without_the_fingerprint_other_clips_would_follow_in_silence(world, manifest, monkeypatch):
    """The control."""
    monkeypatch.setattr(resuming, "check_data", lambda *given: None)
    CHANGES["rows in another order"](pl.read_parquet(manifest)).write_parquet(manifest)
    run = train(world.recipe("--data.manifest", str(manifest)))
    assert max(losses(run)) == 6
