"""Clips: flipped bits, absurd sizes, too many bad ones, and thousands of them."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import struct
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import polars as pl
import pytest

from frameloom.core.errors import DataError
from frameloom.core.files import digest_file
from frameloom.core.random import numpy_stream
from frameloom.data.curation.verify import verify_files
from frameloom.data.loading.bad_clips import BadClipLog
from frameloom.data.manifest.sources.reading import read_source
from frameloom.data.media.decode import ClipError, DecodeLimits, probe_clip, read_clip
from frameloom.data.media.probe import probe_header
from frameloom.data.media.writing import write_video
from frameloom.training.train import train
from tests.faults.runs import digests, metrics

# Row 20: A flipped bit in a clip mostly decodes to other pixels without an error; the digests of the manifest find
# each.

COUNT = 150


@pytest.fixture
def data(world):
    return shutil.copytree(world.shared / "data", world.folder / "data")


def flip(content: bytes, number: int) -> bytes:
    """One bit of the pictures, not of the index."""
    draw = numpy_stream(number, "flipped clip")
    start, index = content.index(b"mdat") + 4, content.index(b"moov")
    end = index - 4 if index > start else len(content)
    changed = bytearray(content)
    changed[int(draw.integers(start, end))] ^= 1 << int(draw.integers(8))
    return bytes(changed)


def write_clip(path: Path) -> None:
    """A clip with much in it, so that a bit of the file is mostly a bit of a picture."""
    steps_FHWC = numpy_stream(0, "pixels").integers(-9, 10, (16, 64, 64, 3))
    write_video(path, (120 + steps_FHWC.cumsum(0).clip(-60, 60)).astype(np.uint8), 24, preset="ultrafast")


def test_20_every_flip_is_found_by_digest_and_most_pass_the_decoder(tmp_path, tally):
    path, num_silent = tmp_path / "a.mp4", 0
    write_clip(path)
    content, right = path.read_bytes(), read_clip(path, indices=range(16), height=32, width=32)
    table = pl.DataFrame({"path": ["a.mp4"], "sha256": [digest_file(path)]})
    for number in range(COUNT):
        path.write_bytes(flip(content, number))
        tally.inject()
        with pytest.raises(DataError, match=r"1 of 1 files[^$]*\n  a.mp4: its bytes have changed$"):
            verify_files(table, tmp_path, name="one")
        if number < 20:  # the control: what decoding alone makes of it
            try:
                num_silent += not read_clip(path, indices=range(16), height=32, width=32).equal(right)
            except DataError:
                continue
    assert num_silent >= 10, "decoders notice most changes: digests are not needed"
    path.write_bytes(content)
    assert verify_files(table, tmp_path, name="one") == 1


def test_20_the_command_names_what_changed_or_is_gone(warm, data, tally):
    manifest = str(data / "manifest.parquet")
    whole = warm.expect(warm.command("data", "verify", manifest))
    assert "40 files are what they were" in whole
    paths = pl.read_parquet(manifest)["path"].to_list()
    (data / paths[0]).unlink()
    (data / paths[1]).write_bytes(b"else")
    tally.inject(2)
    found = warm.expect(warm.command("data", "verify", manifest), 2)
    assert "2 of 40 files are not what they were" in found
    assert f"{paths[0]}: missing" in found and f"{paths[1]}: its bytes have changed" in found


def test_20_a_manifest_without_digests_is_told_how_to_get_them(warm, data):
    manifest, other = data / "plain.parquet", data / "with.parquet"
    pl.read_parquet(data / "manifest.parquet").drop("sha256").write_parquet(manifest)
    refused = warm.expect(warm.command("data", "verify", str(manifest)), 2)
    assert "--out" in refused
    assert warm.wait(warm.command("data", "verify", str(manifest), "--out", str(other))) == 0
    wanted = pl.read_parquet(data / "manifest.parquet")["sha256"].to_list()
    assert read_source(other).table["sha256"].to_list() == wanted


# Row 21: A clip that is too large or too long is refused from its header: quickly, and in little memory.

SIDE = 16_000
WIDE = DecodeLimits(max_pixels=2 * 10**9, max_frames=10**10, max_seconds=10**10)


def write_huge(path: Path) -> None:
    """One gray frame of 16000 x 16000, which compresses to little."""
    with av.open(str(path), "w") as output:
        stream = output.add_stream("mjpeg", rate=24)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuvj420p"
        stream.codec_context.thread_count = 1
        frame = av.VideoFrame(SIDE, SIDE, "yuvj420p")
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        frame.pts, frame.time_base = 0, Fraction(1, 24)
        output.mux(stream.encode(frame))
        output.mux(stream.encode())


def write_small(path: Path, *, frames: int = 12, rate: int = 24, step: int = 1) -> None:
    with av.open(str(path), "w") as output:
        stream = output.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), number % 200, np.uint8), "rgb24")
            frame.pts, frame.time_base = number * step, Fraction(1, rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())


def write_many_frames(path: Path) -> None:
    """An AVI whose header declares a billion frames: `strh` has its length 32 bytes behind its start."""
    write_small(path)
    data = bytearray(path.read_bytes())
    place = data.index(b"strh") + 8 + 32
    data[place : place + 4] = struct.pack("<I", 10**9)
    path.write_bytes(data)


def write_long(path: Path) -> None:
    """Twelve hours at one frame a second, most of them not there."""
    write_small(path, frames=13, rate=1, step=3600)


CLIPS = {
    "huge.avi": (write_huge, "16000x16000 pixels in its header"),
    "many frames.avi": (write_many_frames, "declares 1000000000 frames"),
    "long.mp4": (write_long, "lasts 4320"),
}


def look(path: str, out: str) -> None:
    """In a process of its own: what is said of a clip by both readers, how long it took and how much memory it grew."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told, seconds = [], []
    for read in (lambda: probe_header(Path(path)), lambda: read_clip(Path(path), indices=[0], height=32, width=32)):
        started = time.process_time()
        try:
            read()
            told.append("read")
        except ClipError as error:
            told.append(str(error))
        seconds.append(time.process_time() - started)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    Path(out).write_text(json.dumps({"told": told, "seconds": seconds, "grown_mb": grown / 1024}))


@pytest.mark.parametrize("name", CLIPS)
def test_21_it_is_refused_from_the_header(warm, tally, tmp_path, name):
    message = CLIPS[name][1]
    path = tmp_path / name
    warm.run("tests.faults.test_clips:write", name, str(path))
    assert path.stat().st_size < 2_000_000
    tally.inject()
    warm.run("tests.faults.test_clips:look", str(path), str(tmp_path / "out"))
    found = json.loads((tmp_path / "out").read_text())
    # The reader of frames may be refused by the decoder, which is told the same limit.
    assert message in found["told"][0] and found["told"][1] != "read", found
    assert max(found["seconds"]) < 0.2 and found["grown_mb"] < 50, found


def write(name: str, path: str) -> None:
    CLIPS[name][0](Path(path))


def decode_without_limits(path: str, out: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read_clip(Path(path), indices=[0], height=32, width=32, limits=WIDE)
    Path(out).write_text(str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def test_21_without_the_limit_a_small_file_would_take_hundreds_of_megabytes(warm, tmp_path):
    """The control."""
    path, out = tmp_path / "huge.avi", tmp_path / "out"
    warm.run("tests.faults.test_clips:write", "huge.avi", str(path))
    warm.run("tests.faults.test_clips:decode_without_limits", str(path), str(out))
    assert float(out.read_text()) > 200


# Row 22: More bad clips than the recipe allows stop the run with their list; fewer are replaced, the same way on
# every run.


@pytest.fixture
def spoilt(world) -> tuple[list[str], list[str]]:
    """Words for a set with two broken clips of about thirty, and the paths of the two."""
    data = shutil.copytree(world.shared / "data", world.folder / "data")
    paths = pl.read_parquet(data / "manifest.parquet").filter(split="train", kind="video")["path"].to_list()[:2]
    for path in paths:
        (data / path).write_bytes(b"not a video")
    return ["--data.manifest", str(data / "manifest.parquet"), "--train.steps", "10"], paths


def listed(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "bad_clips.jsonl").read_text().splitlines()]


def test_22_the_run_stops_with_the_list(world, spoilt, tally):
    words, paths = spoilt
    tally.inject()
    with pytest.raises(DataError, match=r"clips cannot be read, over the limit of 1%") as caught:
        train(world.recipe(*words, "--name", "strict"))
    assert "bad_clips.jsonl" in str(caught.value) and any(path in str(caught.value) for path in paths)


def test_22_replacement_is_the_same_on_every_run_and_after_a_resume(world, spoilt, tally):
    words, paths = [*spoilt[0], "--data.bad_limit", "0.2"], spoilt[1]
    tally.inject(2)
    first = train(world.recipe(*words, "--name", "first"))
    train(world.recipe(*words, "--name", "second", "--train.steps", "4"))
    second = train(world.recipe(*words, "--name", "second", "--data.workers", "2"))
    assert {entry["path"] for entry in listed(first)} == set(paths)
    assert sorted(map(str, listed(first))) == sorted(map(str, listed(second)))
    assert digests(first, 10) == digests(second, 10) and metrics(first) == metrics(second)
    whole = train(world.recipe("--train.steps", "10", "--name", "whole"))
    assert digests(first, 10) != digests(whole, 10)


def test_22_without_the_limit_the_run_would_go_on(world, spoilt, monkeypatch):
    """The control."""
    begin = BadClipLog.__init__
    monkeypatch.setattr(
        BadClipLog, "__init__", lambda self, path, **given: begin(self, path, **{**given, "limit": 1.0})
    )
    assert len(listed(train(world.recipe(*spoilt[0])))) >= 2


# Row 24: Thousands of decoded clips leave no memory, no descriptor and no thread behind.

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
def test_24_nothing_is_left_behind(warm, tally, world, tmp_path, count):
    table = pl.read_parquet(world.shared / "data" / "manifest.parquet").filter(kind="video")
    paths = [str(world.shared / "data" / path) for path in table["path"].to_list()]
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(Path(paths[0]).read_bytes()[:1500])
    tally.inject(count)
    warm.run("tests.faults.test_clips:decode", paths, str(bad), count, limit_s=280)


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


def test_24_without_closing_descriptors_would_pile_up(warm, world):
    """The control."""
    table = pl.read_parquet(world.shared / "data" / "manifest.parquet").filter(kind="video")
    warm.run("tests.faults.test_clips:leave_open", str(world.shared / "data" / table["path"][0]))
