"""Claims about the plan that must hold for any manifest, number of ranks, accumulation, worker and restart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from frameloom.data.buckets.grid import build_grid
from frameloom.data.buckets.policy import BucketPolicy, Clips, counter_draw
from frameloom.data.loading.batch import Batch, BatchRequest, OnOpen, ignore_open
from frameloom.data.order.plan import BatchPlan, plan_epoch
from tests.data.loading.plan_requests import make_requests, read_plan

GRID = {
    "64px": {1: [1.0, 5], 5: [1.0, 3], 17: [0.7, 2]},
    "128px": {1: [0.5, 2], 5: [[0.8, 0.3], 2], 33: [0.5, 1]},
}

ENOUGH = 40  # fewer rows can come out in the same order by chance

# Derandomised: a failure is found again by the next run, and nothing is written beside the tests.
quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Case:
    """The geometry of a manifest and how a run goes over it."""

    clips: Clips
    policy: BucketPolicy
    seed: int
    epoch: int
    accumulate: int

    def assign(self, seed: int, epoch: int) -> NDArray[np.int32]:
        rows = np.arange(len(self.clips.frames), dtype=np.int64)
        return self.policy.assign_clips(self.clips, rows, counter_draw(seed, epoch))

    @property
    def assignment(self) -> NDArray[np.int32]:
        return self.assign(self.seed, self.epoch)

    def plan(self, *, seed: int | None = None, epoch: int | None = None, drop_last: bool = False) -> BatchPlan:
        seed = self.seed if seed is None else seed
        epoch = self.epoch if epoch is None else epoch
        return plan_epoch(
            self.assign(seed, epoch),
            self.policy.batch_sizes,
            self.policy.costs,
            seed=seed,
            epoch=epoch,
            accumulate=self.accumulate,
            cost_group=8,
            drop_last=drop_last,
        )


# frames, height, width, frame rate (NaN: an image)
sides = st.integers(16, 300)
kinds = st.one_of(
    st.tuples(st.integers(1, 90), sides, sides, st.sampled_from([12.0, 23.976, 25.0, 60.0])),
    st.tuples(st.just(1), sides, sides, st.just(math.nan)),
)


@st.composite
def cases(draw: st.DrawFn, min_rows: int = 0) -> Case:
    """A few kinds of clips, each many times: buckets fill up, and left-overs remain."""
    table = np.array(draw(st.lists(kinds, min_size=1, max_size=6)), dtype=np.float64)
    choice = np.random.default_rng(draw(st.integers(0, 2**32)))
    frames, height, width, fps = table[choice.integers(0, len(table), draw(st.integers(min_rows, 200)))].T
    clips = Clips(frames.astype(np.int64), height.astype(np.int64), width.astype(np.int64), fps)
    policy = build_grid(GRID, stride=16, fps_max=24)
    return Case(clips, policy, draw(st.integers(0, 2**40)), draw(st.integers(0, 100)), draw(st.integers(1, 4)))


def walk(plan: BatchPlan, num_ranks: int, accumulate: int, position: int = 0) -> Iterator[list[BatchRequest]]:
    """What all ranks together read in each step from micro-batch `position` on, as their loaders are told."""
    loaders = [
        list(make_requests(plan, position=position, rank=rank, num_ranks=num_ranks)) for rank in range(num_ranks)
    ]
    step = 0
    while any(len(loader) > step for loader in loaders):
        yield [request for loader in loaders for request in loader[step : step + accumulate]]
        step += accumulate


def rows_of(requests: list[BatchRequest]) -> list[int]:
    return [int(row) for request in sorted(requests, key=lambda request: request.index) for row in request.rows]


@quick
@given(cases())
def test_every_row_that_has_a_bucket_is_used_exactly_once(case: Case) -> None:
    wanted = np.flatnonzero(case.assignment >= 0)
    plan = case.plan()
    assert np.array_equal(np.sort(plan.order), wanted) and len(plan.starts) == plan.num_microbatches + 1
    for m in range(plan.num_microbatches):
        assert np.array_equal(plan.order[plan.sample_indices(m)], plan.rows(m)) and len(plan.rows(m))
    # The control loses rows: partial batches, and those that fill no step.
    dropped = case.plan(drop_last=True)
    assert np.array_equal(np.sort(dropped.order), wanted) == (dropped.num_microbatches == case.plan().num_microbatches)


@quick
@given(cases())
def test_a_microbatch_has_one_shape_and_no_more_clips_than_its_bucket_allows(case: Case) -> None:
    plan, assignment = case.plan(), case.assignment
    for m in range(plan.num_microbatches):
        bucket = case.policy.buckets[plan.buckets[m]]
        assert set(assignment[plan.rows(m)].tolist()) == {bucket.index}
        assert len(plan.rows(m)) <= bucket.batch_size
    counts = np.bincount(plan.buckets, minlength=len(case.policy.buckets))
    if np.count_nonzero(counts > 10) > 1:  # cut in the manifest's order, batches would mix shapes
        pieces = np.split(assignment[np.sort(plan.order)], plan.starts[1:-1])
        assert any(len(set(piece.tolist())) > 1 for piece in pieces)


@quick
@given(cases(), st.integers(1, 70), st.integers(1, 70))
def test_any_number_of_ranks_walks_the_same_global_order(case: Case, num_ranks: int, other: int) -> None:
    plan = case.plan()
    for ranks in (num_ranks, other):
        steps = [rows_of(step) for step in walk(plan, ranks, case.accumulate)]
        assert [row for step in steps for row in step] == plan.order.tolist()
        # A step is the next `ranks * accumulate` micro-batches, and only the last one may be short.
        ends = plan.starts[ranks * case.accumulate :: ranks * case.accumulate]
        assert np.cumsum([len(step) for step in steps])[: len(ends)].tolist() == ends.tolist()
    if plan.num_samples >= ENOUGH:
        other_seed = case.plan(seed=case.seed + 1)
        assert [row for step in walk(other_seed, num_ranks, 1) for row in rows_of(step)] != plan.order.tolist()


@quick
@given(cases(min_rows=1), st.integers(1, 16), st.integers(1, 16), st.data())
def test_a_restart_at_any_step_with_other_ranks_gives_the_rest(
    case: Case, before: int, after: int, data: st.DataObject
) -> None:
    plan = case.plan()
    steps = [rows_of(step) for step in walk(plan, before, case.accumulate)]
    done = data.draw(st.integers(0, len(steps)))
    position = sum(len(step) for step in steps[:done])
    # All that a run keeps is the position in samples; the plan is worked out again.
    again = case.plan()
    microbatch = int(again.starts.searchsorted(position))
    assert again.starts[microbatch] == position
    rest = [row for step in walk(again, after, case.accumulate, microbatch) for row in rows_of(step)]
    assert [row for step in steps[:done] for row in step] + rest == plan.order.tolist()
    if microbatch < plan.num_microbatches:  # a restart one micro-batch later would lose it
        late = [row for step in walk(again, after, case.accumulate, microbatch + 1) for row in rows_of(step)]
        assert late == rest[len(plan.rows(microbatch)) :] != rest


class PlainReader:
    """Gives back what it was asked for, without files."""

    def __init__(self, policy: BucketPolicy) -> None:
        self.policy = policy

    def read(self, request: BatchRequest, on_open: OnOpen = ignore_open) -> Batch:
        on_open(int(request.rows[0]))
        bucket = self.policy.buckets[request.bucket]
        return Batch(request.epoch, request.index, bucket, request.rows, request.sample_indices, [])

    def name(self, row: int) -> str:
        return f"row {row}"


def loaded(
    plan: BatchPlan, policy: BucketPolicy, workers: int, position: int = 0
) -> list[tuple[int, list[int], list[int]]]:
    batches = read_plan(plan, PlainReader(policy), workers=workers, position=position, timeout_s=60)
    return [(batch.bucket.index, batch.rows.tolist(), batch.sample_indices.tolist()) for batch in batches]


# Starting workers takes a second, so a failure is shown as it was found and not made smaller.
@settings(quick, max_examples=2, phases=[Phase.generate])
@given(cases(min_rows=60), st.integers(1, 2), st.floats(0, 0.9))
def test_any_number_of_workers_gives_the_same_batches_after_a_restart(case: Case, workers: int, share: float) -> None:
    plan = case.plan()
    position = int(share * plan.num_microbatches)
    alone = loaded(plan, case.policy, 0)
    assert loaded(plan, case.policy, workers, position) == alone[position:]
    if plan.num_microbatches:
        assert loaded(plan, case.policy, 0, position + 1) != alone[position:]


@quick
@given(cases(min_rows=120), st.integers(1, 2**40))
def test_another_seed_or_epoch_gives_another_order(case: Case, change: int) -> None:
    plan = case.plan()
    assert np.array_equal(case.plan().order, plan.order)
    if plan.num_samples >= ENOUGH:
        assert not np.array_equal(case.plan(seed=case.seed + change).order, plan.order)
        assert not np.array_equal(case.plan(epoch=case.epoch + 1).order, plan.order)


@quick
@given(cases())
def test_drop_last_leaves_out_less_than_a_batch_of_each_bucket_and_a_step(case: Case) -> None:
    plan, assignment, sizes = case.plan(drop_last=True), case.assignment, case.policy.batch_sizes
    assert np.array_equal(np.diff(plan.starts), sizes[plan.buckets])
    assert len(np.unique(plan.order)) == plan.num_samples
    counts = np.bincount(assignment[assignment >= 0], minlength=len(sizes))
    assert plan.num_microbatches == (counts // sizes).sum() // case.accumulate * case.accumulate
