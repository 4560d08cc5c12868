"""Workers that die, hang or are killed are replaced, and what comes out is what would have come out."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import signal
import sys
from multiprocessing import active_children
from multiprocessing.forkserver import _forkserver
from pathlib import Path

import pytest

from frameloom.config.schema.data import DataSection
from frameloom.core.errors import FrameloomError, RunError
from frameloom.data.buckets.policy import BucketPolicy, assign
from frameloom.data.loading.bad_clips import BadClipLog
from frameloom.data.loading.batch import Batch
from frameloom.data.loading.reader import BatchReader
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.order.plan import BatchPlan, plan_epoch
from tests.data.loading.plan_requests import iterate_epochs, read_plan

MODULE = "frameloom_faulty_reader"
SETTINGS = DataSection(frame_start="random")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory):
    """The faulty reader under a name that workers find on their path."""
    folder = tmp_path_factory.mktemp("modules")
    shutil.copy(Path(__file__).with_name("faulty_reader.py"), folder / f"{MODULE}.py")
    sys.path.insert(0, str(folder))
    yield importlib.import_module(MODULE)
    sys.path.remove(str(folder))
    del sys.modules[MODULE]


def plan_of(manifest: Manifest, grid: BucketPolicy, epoch: int = 0) -> BatchPlan:
    return plan_epoch(assign(manifest, grid, 1, epoch), grid.batch_sizes, grid.costs, seed=1, epoch=epoch)


def content(batch: Batch) -> tuple[object, ...]:
    assert batch.pixels_BCFHW is not None
    bad = tuple((clip.row, clip.ordinal, clip.fatal) for clip in batch.bad)
    return batch.epoch, batch.index, tuple(batch.rows), bad, batch.pixels_BCFHW.numpy().tobytes()


def read_all(manifest: Manifest, grid: BucketPolicy, reader: BatchReader, **kwargs) -> list[tuple[object, ...]]:
    kwargs = {"workers": 1, "timeout_s": 60, "prefetch": 2} | kwargs
    found = [content(batch) for batch in read_plan(plan_of(manifest, grid), reader, **kwargs)]
    assert not active_children()
    return found


def read_plainly(manifest: Manifest, grid: BucketPolicy, *bad_rows: int) -> list[tuple[object, ...]]:
    """In this process, with some rows not opened at all."""
    reader = BatchReader(manifest, grid, seed=1, data=SETTINGS)
    quarantine = {row: "not to be opened" for row in bad_rows}
    batches = read_plan(plan_of(manifest, grid), reader, quarantine=quarantine)
    return [content(batch) for batch in batches]


def faulty(module, manifest: Manifest, grid: BucketPolicy, fault: str, flag: Path | None = None) -> BatchReader:
    """Fails at the first row of micro-batch 2, a video."""
    reader = module.FaultyReader(manifest, grid, seed=1, data=SETTINGS)
    reader.fault, reader.row, reader.flag = fault, int(plan_of(manifest, grid).rows(2)[0]), flag
    if flag is not None:
        flag.touch()
    return reader


@pytest.mark.parametrize(("fault", "timeout_s"), [("segfault", 60), ("hang", 3)])
def test_a_clip_that_ends_every_worker_is_replaced_and_the_run_continues(
    module, manifest: Manifest, grid: BucketPolicy, fault: str, timeout_s: float
) -> None:
    reader = faulty(module, manifest, grid, fault)
    found = read_all(manifest, grid, reader, timeout_s=timeout_s)
    assert found == read_plainly(manifest, grid, reader.row)
    plain = read_plainly(manifest, grid)
    assert found != plain
    # Only batches that held or drew the clip differ.
    assert sum(ours != theirs for ours, theirs in zip(found, plain, strict=True)) <= 2


def test_a_single_accident_changes_nothing(module, manifest: Manifest, grid: BucketPolicy, tmp_path: Path) -> None:
    reader = faulty(module, manifest, grid, "kill", tmp_path / "flag")
    assert read_all(manifest, grid, reader) == read_plainly(manifest, grid)
    assert not (tmp_path / "flag").exists()


def test_quarantine_is_kept_for_the_whole_run_and_for_the_next(
    module, manifest: Manifest, grid: BucketPolicy, tmp_path: Path
) -> None:
    reader = faulty(module, manifest, grid, "kill")
    log = BadClipLog(tmp_path / "bad_clips.jsonl", num_clips=len(manifest), limit=0.5)
    length = plan_of(manifest, grid).num_microbatches

    def read(log: BadClipLog) -> list[tuple[object, ...]]:
        found = []
        epochs = iterate_epochs(
            lambda epoch: plan_of(manifest, grid, epoch),
            reader,
            workers=1,
            timeout_s=60,
            quarantine=log.quarantine,
        )
        for _, batch in itertools.islice(epochs, 2 * length):
            log.add(batch.bad)
            found.append(content(batch))
        epochs.close()
        return found

    first = read(log)
    fatal = [clip for clip in log.clips if clip.fatal]
    assert {clip.row for clip in fatal} == {reader.row}
    assert "a worker that read it died (SIGKILL), 2 times" in fatal[0].reason
    again = BadClipLog(tmp_path / "bad_clips.jsonl", num_clips=len(manifest), limit=0.5)
    assert set(again.quarantine) == {reader.row}
    reader.fault = "raise"  # would end the run if the clip were opened once more
    assert read(again) == first
    assert len(again.clips) == len(log.clips)


def test_death_between_files_is_an_error_with_the_batch(module, manifest: Manifest, grid: BucketPolicy) -> None:
    reader = faulty(module, manifest, grid, "between")
    with pytest.raises(RunError, match=r"died \(SIGKILL\) in micro-batch 2 of epoch 0, between files .*mp4.*, 2 times"):
        read_all(manifest, grid, reader)
    assert not active_children()


def test_workers_that_cannot_start_end_the_run(module, manifest: Manifest, grid: BucketPolicy) -> None:
    reader = faulty(module, manifest, grid, "start")
    with pytest.raises(RunError, match="loader workers in a row died or hung, the last before it read anything"):
        read_all(manifest, grid, reader)
    assert not active_children()


def test_mistakes_in_a_worker_keep_their_kind(module, manifest: Manifest, grid: BucketPolicy) -> None:
    with pytest.raises(KeyError, match="a mistake of ours") as caught:
        read_all(manifest, grid, faulty(module, manifest, grid, "raise"))
    assert any("faulty_reader" in note for note in caught.value.__notes__)
    # Made from two arguments, so it cannot travel as it is; what it says must.
    with pytest.raises(FrameloomError, match=r"pip install 'frameloom\[its name\]'"):
        read_all(manifest, grid, faulty(module, manifest, grid, "extra"))


def count_zombies() -> int:
    """Ended processes that nobody waited for, ours or the fork server's."""
    parents = {os.getpid(), _forkserver._forkserver_pid}
    found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        found += state == "Z" and int(parent) in parents
    return found


@pytest.mark.slow
def test_hundreds_of_batches_and_deaths_leave_nothing_behind(manifest: Manifest, grid: BucketPolicy) -> None:
    reader = BatchReader(manifest, grid, seed=1, data=DataSection(frame_start="first"))
    epochs = iterate_epochs(lambda epoch: plan_of(manifest, grid, epoch), reader, workers=2, timeout_s=60)

    def read(count: int) -> None:
        for number, _ in enumerate(itertools.islice(epochs, count)):
            if number == 20:
                os.kill(active_children()[0].pid or 0, signal.SIGKILL)

    read(50)
    descriptors = len(os.listdir("/proc/self/fd"))
    mapped = Path("/proc/self/maps").read_text().count("frameloom-batch")
    read(200)
    # One worker may just be between two of its descriptors.
    assert abs(len(os.listdir("/proc/self/fd")) - descriptors) <= 2
    assert Path("/proc/self/maps").read_text().count("frameloom-batch") <= mapped + 4
    epochs.close()
    assert not active_children()
    assert count_zombies() == 0
    assert len(os.listdir("/proc/self/fd")) < descriptors
