"""Thousands of decoded clips leave no memory, no descriptor and no thread behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import av
import polars as pl
import pytest

from frameloom.data.media.decode import ClipError, probe_clip, read_clip

MEGABYTE = 2**20


def resources() -> tuple[int, int, int]:
    """Descriptors, threads and bytes of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def decode(paths: list[str], bad: str, count: int) -> None:
    """In a process of its own: warm up, decode, and compare; every tenth is a broken file."""

    def read(number: int) -> None:
        if number % 10:
            read_clip(Path(paths[number % len(paths)]), indices=[0, 5], height=32, width=32)
            return
        try:
            probe_clip(Path(bad))
        except ClipError:
            return
        raise AssertionError("the broken clip was read")

    for number in range(100):
        read(number)
    before = resources()
    for number in range(count):
        read(number)
    after = resources()
    assert after[:2] == before[:2], (before, after)
    assert after[2] - before[2] < 20 * MEGABYTE, (before, after)


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.stress)])
def test_nothing_is_left_behind(warm, tally, world, tmp_path, count):
    table = pl.read_parquet(world.shared / "data" / "manifest.parquet").filter(kind="video")
    paths = [str(world.shared / "data" / path) for path in table["path"].to_list()]
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(Path(paths[0]).read_bytes()[:1500])
    tally.inject(count)
    warm.run("tests.faults.test_24_many_clips:decode", paths, str(bad), count, limit_s=280)


def leave_open(path: str) -> None:
    """Containers that nobody closes."""
    gc.disable()
    before = resources()
    kept = []
    for _ in range(40):
        container = av.open(path, options={"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2"})
        next(container.decode(video=0))
        kept.append(container)
    assert resources()[0] > before[0] + 20


def test_without_closing_descriptors_would_pile_up(warm, world):
    """The control."""
    table = pl.read_parquet(world.shared / "data" / "manifest.parquet").filter(kind="video")
    warm.run("tests.faults.test_24_many_clips:leave_open", str(world.shared / "data" / table["path"][0]))
