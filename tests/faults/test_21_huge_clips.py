"""A clip that is too large or too long is refused from its header: quickly, and in little memory."""

from __future__ import annotations

import json
import resource
import struct
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from frameloom.data.media.decode import ClipError, DecodeLimits, read_clip
from frameloom.data.media.probe import probe_header

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
def test_it_is_refused_from_the_header(warm, tally, tmp_path, name):
    message = CLIPS[name][1]
    path = tmp_path / name
    warm.run("tests.faults.test_21_huge_clips:write", name, str(path))
    assert path.stat().st_size < 2_000_000
    tally.inject()
    warm.run("tests.faults.test_21_huge_clips:look", str(path), str(tmp_path / "out"))
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


def test_without_the_limit_a_small_file_would_take_hundreds_of_megabytes(warm, tmp_path):
    """The control."""
    path, out = tmp_path / "huge.avi", tmp_path / "out"
    warm.run("tests.faults.test_21_huge_clips:write", "huge.avi", str(path))
    warm.run("tests.faults.test_21_huge_clips:decode_without_limits", str(path), str(out))
    assert float(out.read_text()) > 200
