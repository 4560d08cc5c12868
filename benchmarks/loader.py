"""Batches of 720p clips at 256 px from two worker processes, against other loaders.

The published way is torch's DataLoader over a data set that decodes whole files and scales afterwards; torchdata's
StatefulDataLoader gets decord, the fastest of the other readers. All read the same clips, 33 frames each, in batches of
two. Starting the workers is not timed: a round begins with the second batch. Processor time of workers is not seen.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.decode import (
    CLIP_FRAMES,
    FRAMES,
    HEIGHT,
    WIDTH,
    Read,
    decode_then_resize,
    read_with_decord,
    write_moving_texture,
)
from benchmarks.harness import BenchSettings, Contender, Row, compare_rates, load_baseline, measure_or_skip, take_turns
from frameloom.config.schema.data import DataSection
from frameloom.core.random import numpy_stream
from frameloom.data.buckets.grid import build_grid
from frameloom.data.buckets.policy import Bucket
from frameloom.data.loading.batch import BatchRequest
from frameloom.data.loading.loader import read_requests
from frameloom.data.loading.reader import BatchReader
from frameloom.data.manifest.manifest import Manifest, write_manifest

_BATCH, _WORKERS, _FILES = 2, 2, 4


def measure(bench: BenchSettings) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_frames = bench.pick(CLIP_FRAMES, 60)
        paths = [
            write_moving_texture(folder / f"{number}.mp4", frames=num_frames) for number in range(bench.pick(_FILES, 1))
        ]
        order = [paths[number % len(paths)] for number in range(bench.pick(20, 4))]
        reader, requests = _build_ours(folder, paths, len(order), num_frames)
        for against, build in LOADERS.items():
            ours = _Rounds(lambda: read_requests(requests, reader, workers=_WORKERS))
            yield from measure_or_skip("loader", against, _measure, ours, build, order, against, bench)


class _Rounds:
    """One pass over batches as a side: the first batch is there before the clock starts."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start = start
        self._batches: Iterator[Any] | None = None
        self.num_clips = 0

    def side(self) -> Contender:
        return Contender(self.run, prepare=self.prepare, finish=self.finish)

    def prepare(self) -> None:
        self._batches = iter(self._start())
        next(self._batches)

    def run(self) -> None:
        assert self._batches is not None
        self.num_clips = _BATCH * sum(1 for _ in self._batches)

    def finish(self) -> None:
        self._batches = None


def _measure(ours: _Rounds, build: Build, order: list[Path], against: str, bench: BenchSettings) -> Row:
    other = build(order)
    times = take_turns({"ours": ours.side(), "other": other.side()}, bench.rounds, warmup=0)
    if ours.num_clips != other.num_clips:
        raise ValueError(
            f"both loaders should give as many clips, but they gave {ours.num_clips} and {other.num_clips}"
        )
    row = compare_rates(
        "loader",
        f"720p to {WIDTH}x{HEIGHT}, {FRAMES} frames, {_WORKERS} workers",
        times["ours"],
        times["other"],
        amount=ours.num_clips,
        unit="clips/s",
        against=against,
    )
    return replace(row, ours_cpu_s=None, other_cpu_s=None)


def _build_ours(
    folder: Path, paths: list[Path], num_clips: int, num_frames: int
) -> tuple[BatchReader, list[BatchRequest]]:
    table = pl.DataFrame(
        {
            "path": [path.name for path in paths],
            "kind": ["video"] * len(paths),
            "height": [720] * len(paths),
            "width": [1280] * len(paths),
            "frames": [num_frames] * len(paths),
            "fps": [30.0] * len(paths),
            "caption": ["a texture moves"] * len(paths),
        }
    )
    write_manifest(folder / "manifest.parquet", table)
    policy = build_grid({"256px": {FRAMES: [1.0, _BATCH]}}, stride=16, fps_max=None)
    bucket = next(one for one in policy.buckets if (one.height, one.width) == (HEIGHT, WIDTH))
    reader = BatchReader(Manifest.read(folder / "manifest.parquet"), policy, DataSection(), seed=0)
    return reader, [_request(bucket, start, len(paths)) for start in range(0, num_clips, _BATCH)]


def _request(bucket: Bucket, start: int, num_rows: int) -> BatchRequest:
    sample_indices = np.arange(start, start + _BATCH)
    return BatchRequest(0, start // _BATCH, bucket.index, sample_indices % num_rows, sample_indices)


@dataclass(frozen=True)
class ClipSet(Dataset[Tensor]):
    """A window of each file, at a start of its own."""

    paths: list[Path]
    read: Read
    num_frames: int

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        torch.set_num_threads(1)
        start = int(numpy_stream(0, "bench start", index).integers(self.num_frames - FRAMES + 1))
        return self.read(self.paths[index], np.arange(start, start + FRAMES), HEIGHT, WIDTH)


Build = Callable[[list[Path]], _Rounds]


def _with_torch(paths: list[Path]) -> _Rounds:
    return _with(DataLoader, paths, decode_then_resize)


def _with_torchdata(paths: list[Path]) -> _Rounds:
    load_baseline("decord")
    loader = load_baseline("torchdata.stateful_dataloader").StatefulDataLoader

    def build(*args: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it uses what this torch calls deprecated
            return loader(*args, **options)

    return _with(build, paths, read_with_decord)


def _with(loader: Any, paths: list[Path], read: Read) -> _Rounds:
    from frameloom.data.media.decode import probe_clip

    clips = ClipSet(paths, read, probe_clip(paths[0]).frames)
    # New processes rather than forked ones: this process has threads.
    return _Rounds(
        lambda: iter(
            loader(clips, batch_size=_BATCH, num_workers=_WORKERS, shuffle=False, multiprocessing_context="spawn")
        )
    )


LOADERS: dict[str, Build] = {
    "DataLoader, decode all, resize after": _with_torch,
    "torchdata's StatefulDataLoader with decord": _with_torchdata,
}
