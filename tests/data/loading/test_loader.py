"""Workers, positions and replacements never change what is read."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import shutil
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frameloom.builders.data import build_plan, build_policy
from frameloom.config.schema.data import DataSection
from frameloom.core.errors import DataError
from frameloom.data.buckets.grid import GridPolicy
from frameloom.data.buckets.policy import assign
from frameloom.data.loading.batch import Batch
from frameloom.data.loading.loader import iterate_batches
from frameloom.data.loading.reader import BatchReader
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.decode import ClipError
from frameloom.data.order.plan import BatchPlan, plan_epoch
from tests.data.loading.plan_requests import iterate_epochs, make_requests, read_plan

SETTINGS = DataSection(frame_start="random", flip=0.5)


def plan_of(manifest: Manifest, grid: GridPolicy, *, seed: int = 1, epoch: int = 0) -> BatchPlan:
    chosen = assign(manifest, grid, seed, epoch)
    return plan_epoch(chosen, grid.batch_sizes, grid.costs, seed=seed, epoch=epoch)


def summary(batch: Batch) -> tuple[object, ...]:
    """Everything of a batch in a form that compares."""
    assert batch.pixels_BCFHW is not None
    pixels = hashlib.sha256(batch.pixels_BCFHW.numpy().tobytes()).hexdigest()
    rows, sample_indices = tuple(batch.rows.tolist()), tuple(batch.sample_indices.tolist())
    shape = tuple(batch.pixels_BCFHW.shape)
    return (
        batch.epoch,
        batch.index,
        batch.bucket,
        rows,
        sample_indices,
        tuple(batch.captions),
        shape,
        pixels,
        tuple(batch.bad),
    )


def read_all(manifest: Manifest, grid: GridPolicy, *, seed: int = 1, **kwargs: int) -> list[tuple[object, ...]]:
    reader = BatchReader(manifest, grid, seed=seed, data=SETTINGS)
    return [summary(batch) for batch in read_plan(plan_of(manifest, grid, seed=seed), reader, **kwargs)]


def test_batches_have_their_buckets_shape_and_captions(manifest: Manifest, grid: GridPolicy) -> None:
    plan = plan_of(manifest, grid)
    reader = BatchReader(manifest, grid, seed=1, data=SETTINGS)
    seen = []
    for batch in iterate_batches(plan, reader):
        assert batch.pixels_BCFHW is not None
        assert batch.pixels_BCFHW.dtype == torch.uint8
        assert batch.pixels_BCFHW.shape == (
            batch.size,
            3,
            batch.bucket.frames,
            batch.bucket.height,
            batch.bucket.width,
        )
        assert batch.captions == manifest.captions(batch.rows)
        assert batch.bad == []
        seen += batch.rows.tolist()
    assert sorted(seen) == sorted(plan.order.tolist())
    assert len(seen) > 8


def test_resuming_at_every_position_gives_the_rest(manifest: Manifest, grid: GridPolicy) -> None:
    whole = read_all(manifest, grid)
    for position in range(len(whole) + 1):
        assert read_all(manifest, grid, position=position) == whole[position:]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_share_an_epoch_without_overlap(manifest: Manifest, grid: GridPolicy, num_ranks: int) -> None:
    whole = read_all(manifest, grid)
    parts = [read_all(manifest, grid, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert parts == [whole[rank::num_ranks] for rank in range(num_ranks)]
    plan = plan_of(manifest, grid)
    for position in range(5):
        split = [list(make_requests(plan, position=position, rank=r, num_ranks=num_ranks)) for r in range(num_ranks)]
        assert sorted(r.index for r in itertools.chain(*split)) == list(range(position, plan.num_microbatches))


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_follow_each_other_with_one_pool(manifest: Manifest, grid: GridPolicy, workers: int) -> None:
    reader = BatchReader(manifest, grid, seed=1, data=SETTINGS)

    def read(epoch: int, position: int, count: int) -> list[tuple[object, ...]]:
        found = []
        pools = set()
        stream = iterate_epochs(
            lambda number: plan_of(manifest, grid, epoch=number),
            reader,
            epoch=epoch,
            position=position,
            workers=workers,
            timeout_s=60,
        )
        for plan, batch in itertools.islice(stream, count):
            assert plan.epoch == batch.epoch
            found.append(summary(batch))
            pools.add(tuple(child.pid for child in active_children()))
        stream.close()
        assert len(pools) == 1
        return found

    length = plan_of(manifest, grid).num_microbatches
    long = read(0, 0, 2 * length + 2)
    assert [item[0] for item in long] == [0] * length + [1] * length + [2] * 2
    assert long[:length] != long[length : 2 * length]
    assert read(1, 2, 3) == long[length + 2 : length + 5]
    assert read(0, length, 2) == long[length : length + 2]


def test_making_a_pool_leaves_the_global_generator_alone(manifest: Manifest, grid: GridPolicy) -> None:
    before = torch.get_rng_state()
    read_all(manifest, grid, workers=1, timeout_s=60)
    assert torch.equal(torch.get_rng_state(), before)


def test_flips_and_starts_depend_on_the_slot(manifest: Manifest, grid: GridPolicy) -> None:
    reader = BatchReader(manifest, grid, seed=1, data=DataSection(frame_start="random", flip=0.0))
    bucket = next(b for b in grid.buckets if b.frames == 9 and b.height == b.width)
    slots = [reader.read_sample(5, bucket, 0, ordinal).pixels_CFHW for ordinal in range(12)]
    assert torch.equal(slots[3], reader.read_sample(5, bucket, 0, 3).pixels_CFHW)
    assert len({clip.numpy().tobytes() for clip in slots}) > 3
    flipping = BatchReader(manifest, grid, seed=1, data=DataSection(frame_start="random", flip=0.5))
    flipped = [torch.equal(flipping.read_sample(5, bucket, 0, n).pixels_CFHW, slots[n].flip(-1)) for n in range(12)]
    plain = [torch.equal(flipping.read_sample(5, bucket, 0, n).pixels_CFHW, slots[n]) for n in range(12)]
    assert all(a != b for a, b in zip(flipped, plain, strict=True))
    assert 0 < sum(flipped) < 12


@pytest.fixture
def damaged(clip_set: Path, tmp_path: Path) -> Manifest:
    """The same set with three bad files: one cut, one text, one gone."""
    root = tmp_path / "damaged"
    shutil.copytree(clip_set.parent, root)
    (root / "a.mp4").write_bytes((root / "a.mp4").read_bytes()[:200])
    (root / "c.mp4").write_text("not a video")
    (root / "i.png").unlink()
    return Manifest.read(root / clip_set.name)


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_clips_are_replaced_alike_with_any_workers(damaged: Manifest, grid: GridPolicy, workers: int) -> None:
    alone = read_all(damaged, grid)
    assert read_all(damaged, grid, workers=workers, timeout_s=60) == alone
    bad = [clip for item in alone for clip in item[-1]]
    assert {clip.path for clip in bad} == {"a.mp4", "c.mp4", "i.png"}


def test_replacements_come_from_the_same_bucket_and_keep_the_slot(damaged: Manifest, grid: GridPolicy) -> None:
    plan = plan_of(damaged, grid)
    chosen = assign(damaged, grid, 1, 0)
    reader = BatchReader(damaged, grid, seed=1, data=SETTINGS)
    for batch in iterate_batches(plan, reader):
        wanted = plan.rows(batch.index)
        assert batch.size == len(wanted)
        assert batch.sample_indices.tolist() == plan.sample_indices(batch.index).tolist()
        assert (chosen[batch.rows] == batch.bucket.index).all()
        failed = {clip.row for clip in batch.bad}
        assert failed.isdisjoint(batch.rows.tolist())
        assert [int(row) for row in wanted if row not in failed] == [
            int(row) for row, first in zip(batch.rows, wanted, strict=True) if first not in failed
        ]
        assert all(clip.epoch == 0 and clip.reason.startswith(str(damaged.root)) for clip in batch.bad)


def test_without_replacements_bad_clips_leave_gaps(damaged: Manifest, grid: GridPolicy) -> None:
    reader = BatchReader(damaged, grid, DataSection(), seed=1)
    batches = [reader.read(replace(request, fallback_rows=None)) for request in make_requests(plan_of(damaged, grid))]
    assert sum(batch.size for batch in batches) + sum(len(batch.bad) for batch in batches) == len(
        plan_of(damaged, grid).order
    )
    assert all(batch.pixels_BCFHW is not None and len(batch.pixels_BCFHW) == batch.size for batch in batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bucket_with_no_good_clip_is_an_error(clip_set: Path, tmp_path: Path, grid: GridPolicy, workers: int) -> None:
    root = tmp_path / "gone"
    root.mkdir()
    shutil.copy(clip_set, root / clip_set.name)
    manifest = Manifest.read(root / clip_set.name)
    with pytest.raises(DataError, match=r"none of \d+ clips could be read") as caught:
        read_all(manifest, grid, workers=workers, timeout_s=60)
    assert "Traceback" not in str(caught.value)
    assert not isinstance(caught.value, ClipError)


def test_reader_survives_pickling(manifest: Manifest, grid: GridPolicy) -> None:
    reader = BatchReader(manifest, grid, seed=1, data=SETTINGS)
    request = next(make_requests(plan_of(manifest, grid)))
    assert summary(pickle.loads(pickle.dumps(reader)).read(request)) == summary(reader.read(request))


def test_epoch_without_batches_is_an_error(world: Any, manifest: Manifest, grid: GridPolicy) -> None:
    empty = plan_epoch(np.full(len(manifest), -1, dtype=np.int32), grid.batch_sizes, grid.costs, seed=0, epoch=0)
    assert list(iterate_batches(empty, BatchReader(manifest, grid, DataSection(), seed=0))) == []
    recipe = world.recipe(data={"buckets": {"_delete_": True, "64px": {"501": [1.0, 1]}}})
    with pytest.raises(DataError, match="no clip fits a bucket in epoch 0"):
        build_plan(recipe, manifest, build_policy(recipe))(0)
