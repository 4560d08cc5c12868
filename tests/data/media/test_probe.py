"""Header facts against what decoding really gives, and the parts of reading headers that the corpus does not reach."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from frameloom.data.media.decode import ClipError, DecodeLimits, kind_of, probe_clip
from frameloom.data.media.probe import expected_content, probe_header, sniff_content
from tests.data.bad_files import _write_clip


@pytest.mark.parametrize("degrees", [None, 90, 180, 270, 45, -30])
@pytest.mark.parametrize("name", ["a.mp4", "a.mov", "a.mkv"])
def test_rotation_and_size_equal_those_of_a_decoded_frame(tmp_path: Path, name: str, degrees: float | None) -> None:
    path = _write_clip(tmp_path / name, frames=2, rotation=degrees)
    header, decoded = probe_header(path), probe_clip(path)
    assert (header.rotation, header.height, header.width) == (decoded.rotation, decoded.height, decoded.width)
    assert (header.rotation != 0) == (degrees is not None)


def test_rotation_is_read_for_codecs_that_one_container_does_not_take(tmp_path: Path) -> None:
    prores = _write_clip(
        tmp_path / "a.mov", codec="prores_ks", pix_fmt="yuv422p10le", options={}, rotation=90, frames=2
    )
    vp9 = _write_clip(tmp_path / "a.webm", codec="libvpx-vp9", options={"cpu-used": "8"}, rotation=90, frames=2)
    ffv1 = _write_clip(tmp_path / "a.mkv", codec="ffv1", options={"level": "3"}, rotation=90, frames=2)
    assert [probe_header(path).rotation for path in (prores, vp9, ffv1)] == [90, 90, 90]


def test_frame_count_is_that_of_the_decoder_where_the_header_says_another(tmp_path: Path) -> None:
    path = _write_clip(tmp_path / "a.mp4", frames=30, times=lambda number: number - 7)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 30
        num_decoded = sum(1 for _ in container.decode(video=0))
    assert probe_header(path).frames == num_decoded == 23


@pytest.mark.parametrize(("rate", "is_variable"), [(Fraction(30000, 1001), False), (Fraction(60), False)])
def test_rounding_to_milliseconds_is_no_variable_rate(tmp_path: Path, rate: Fraction, is_variable: bool) -> None:
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=rate, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(40):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), "rgb24")))
        output.mux(stream.encode())
    facts = probe_header(path)
    assert facts.vfr is is_variable
    assert facts.fps == pytest.approx(float(rate), rel=1e-4)
    uneven = _write_clip(tmp_path / "b.mkv", times=lambda number: number + (number > 5))
    assert probe_header(uneven).vfr


def test_nothing_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clips = [_write_clip(tmp_path / name) for name in ("a.mp4", "a.mkv")]
    noise = tmp_path / "noise.mp4"
    data = bytearray(clips[0].read_bytes())
    start, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
    data[start:end] = bytes(end - start)
    noise.write_bytes(data)
    assert probe_header(noise).frames == probe_header(clips[0]).frames == 12
    with pytest.raises(ClipError):
        probe_clip(noise)


def test_limits_are_those_of_the_decoder(tmp_path: Path) -> None:
    path = _write_clip(tmp_path / "a.mp4", frames=30)
    with pytest.raises(ClipError, match="64x48 pixels in its header"):
        probe_header(path, limits=DecodeLimits(max_pixels=100))
    with pytest.raises(ClipError, match="declares 30 frames"):
        probe_header(path, limits=DecodeLimits(max_frames=29))
    with pytest.raises(ClipError, match="more than 11 frames"):
        probe_header(_write_clip(tmp_path / "a.mkv"), limits=DecodeLimits(max_frames=11))


def test_content_is_told_from_the_first_bytes(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.webp")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg")
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "a.bin").write_bytes(bytes(range(1, 32)))
    _write_clip(tmp_path / "a.mkv", frames=1)
    found = {path.name: sniff_content(path) for path in sorted(tmp_path.iterdir())}
    assert found == {"a.bin": None, "a.jpg": "jpeg", "a.mkv": "matroska", "a.txt": "text", "a.webp": "webp"}
    assert [expected_content(Path(name)) for name in ("A.JPEG", "a.webm", "a.m4v", "a.txt")] == [
        "jpeg",
        "matroska",
        "mp4",
        None,
    ]
    assert [kind_of(Path(name)) for name in ("a.MP4", "a.png", "a.gif")] == ["video", "image", None]
