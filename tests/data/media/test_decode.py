"""Frames of real files; broken ones and their messages are the corpus of tests/faults/test_broken_clips.py."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from frameloom.data.media import decode
from frameloom.data.media.decode import (
    ClipError,
    DecodeLimits,
    probe_clip,
    probe_image,
    read_clip,
    read_image,
)
from frameloom.data.media.transforms import ResizeCrop
from frameloom.data.media.writing import write_video


def make_clip(
    path: Path,
    *,
    frames: int = 40,
    height: int = 48,
    width: int = 64,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    rotation: float | None = None,
    times: Callable[[int], int] = lambda frame: frame,
    options: dict[str, str] | None = None,
    movflags: str = "",
) -> Path:
    """A clip whose frame n has a gray of 5n on its left half, so that a frame's number can be read back; the rest is a
    ramp, so that every place looks different."""
    ramp = np.add.outer(3 * np.arange(height), 2 * np.arange(width))[..., None] % 200
    with av.open(str(path), "w", options={"movflags": movflags} if movflags else {}) as container:
        stream = container.add_stream(codec, rate=24, options=options or {"crf": "1", "preset": "veryfast", "bf": "2"})
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.gop_size = 12
        stream.codec_context.thread_count = 1
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number in range(frames):
            pixels = np.tile(ramp.astype(np.uint8), (1, 1, 3))
            pixels[height // 8 :, : width // 2] = (5 * number) % 256
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
            frame.pts = times(number)
            frame.time_base = Fraction(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def numbers_in(clip_CFHW: Tensor) -> list[int]:
    """The frame numbers that `make_clip` wrote, read from the pixels."""
    height, width = clip_CFHW.shape[-2:]
    gray = clip_CFHW[:, :, height // 4 : -height // 4, width // 8 : width // 4].float().mean(dim=(0, 2, 3))
    return [round(value / 5) for value in gray.tolist()]


def test_frames_come_back_by_number(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.mp4")
    clip = read_clip(path, indices=[0, 3, 17, 39], height=48, width=64)
    assert clip.shape == (3, 4, 48, 64)
    assert clip.dtype == torch.uint8
    assert numbers_in(clip) == [0, 3, 17, 39]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("even.mp4", {}),
        ("variable.mp4", {"times": lambda frame: frame + (frame > 10) * 5 + frame // 7}),
        ("index_last.mov", {}),
        ("matroska.mkv", {}),
        ("vp9.webm", {"codec": "libvpx-vp9", "options": {"cpu-used": "8", "deadline": "realtime", "crf": "4"}}),
        ("no_times.avi", {"codec": "mpeg4", "options": {"qscale": "1", "bf": "1"}}),
        ("ten_bit.mp4", {"pix_fmt": "yuv420p10le"}),
        ("index_first.mp4", {"movflags": "+faststart"}),
        ("open_groups.mp4", {"options": {"crf": "1", "x264-params": "open-gop=1:keyint=12:min-keyint=12:bframes=3"}}),
        ("late_start.mp4", {"times": lambda frame: frame + 7}),
    ],
)
def test_seeking_gives_the_frames_that_reading_from_the_start_gives(tmp_path: Path, name: str, kwargs: dict) -> None:
    path = make_clip(tmp_path / name, frames=120, **kwargs)
    whole = read_clip(path, indices=range(120), height=32, width=32)
    wanted = [60, 61, 83, 119]
    assert torch.equal(read_clip(path, indices=wanted, height=32, width=32), whole[:, wanted])
    assert not torch.equal(whole[:, 60], whole[:, 61])


@dataclass
class DecodeWork:
    """Frames that came out of a decoder, and how many of them were wanted."""

    num_decoded: int = 0
    num_used: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> DecodeWork:
    """Counts what `read_clip` decodes while a test runs."""
    counted = DecodeWork()
    fill = decode._fill

    def count_and_fill(pixels_CFHW: Tensor, numbered: Iterator, *rest) -> int:
        def count() -> Iterator:
            for item in numbered:
                counted.num_decoded += 1
                yield item

        num_found = fill(pixels_CFHW, count(), *rest)
        counted.num_used += num_found
        return num_found

    monkeypatch.setattr(decode, "_fill", count_and_fill)
    return counted


def test_seeking_decodes_only_what_is_needed(tmp_path: Path, work: DecodeWork) -> None:
    path = make_clip(tmp_path / "a.mp4", frames=200)
    read_clip(path, indices=[150, 152], height=16, width=16)
    # Groups of 12 frames: from the key frame before frame 150, or from the start, and never behind the last one wanted.
    assert work.num_used == 2
    assert work.num_decoded <= 12 + 3
    work.num_used = work.num_decoded = 0
    read_clip(path, indices=[3, 5], height=16, width=16)
    assert work.num_used == 2
    assert work.num_decoded == 6


@pytest.mark.parametrize("gop", [250, 1])
def test_one_group_of_pictures_is_decoded_whatever_its_length(tmp_path: Path, work: DecodeWork, gop: int) -> None:
    options = {"crf": "1", "preset": "veryfast", "x264-params": f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes=3"}
    path = make_clip(tmp_path / "a.mp4", frames=300, options=options)
    clip = read_clip(path, indices=range(260, 277, 2), height=48, width=64)
    assert work.num_used == 9
    assert work.num_decoded <= (27 if gop == 250 else 17)
    assert torch.equal(clip, read_clip(path, indices=range(300), height=48, width=64)[:, 260:277:2])


def test_repeated_frames_are_decoded_once(tmp_path: Path, work: DecodeWork) -> None:
    path = make_clip(tmp_path / "a.mp4")
    clip = read_clip(path, indices=[2, 2, 3, 5, 5, 5], height=48, width=64)
    assert numbers_in(clip) == [2, 2, 3, 5, 5, 5]
    assert work.num_used == 3
    with pytest.raises(ValueError, match="rising"):
        read_clip(path, indices=[3, 2], height=48, width=64)


@pytest.mark.parametrize("rotation", [None, 90, 180, 270])
def test_a_cut_off_the_centre_lies_where_the_viewer_sees_it(tmp_path: Path, rotation: float | None) -> None:
    path = make_clip(tmp_path / "a.mp4", height=48, width=64, rotation=rotation)
    facts = probe_clip(path)
    whole = read_clip(path, indices=[30], height=facts.height, width=facts.width)
    place = ResizeCrop(facts.height, facts.width, 20, 30)
    cut_out = read_clip(path, indices=[30], height=24, width=16, crop_rule=lambda height, width: place)
    assert torch.equal(cut_out, whole[:, :, 20:44, 30:46])
    assert not torch.equal(cut_out, whole[:, :, :24, :16])
    sizes = []
    read_clip(path, indices=[0], height=24, width=16, crop_rule=lambda *size: sizes.append(size) or place)
    assert sizes == [(facts.height, facts.width)]


def test_a_place_that_does_not_hold_the_cut_is_refused(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.mp4")
    with pytest.raises(ClipError, match="does not hold 64x48"):
        read_clip(path, indices=[0], height=48, width=64, crop_rule=lambda height, width: ResizeCrop(40, 64, 0, 0))


def test_a_large_jpeg_is_decoded_small(tmp_path: Path) -> None:
    """The picture is the same to the eye, and far fewer pixels are decoded than the file has."""
    ramp = np.linspace(0, 255, 1600, dtype=np.uint8)
    pixels = np.stack([np.tile(ramp, (1200, 1)), np.tile(ramp[:1200, None], (1, 1600)), np.full((1200, 1600), 90)], -1)
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "a.jpg", quality=95)
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "turned.jpg", quality=95, exif=exif)
    small = read_image(tmp_path / "a.jpg", height=96, width=128).int()
    assert (small - read_image(tmp_path / "a.png", height=96, width=128).int()).abs().max() <= 3
    turned = read_image(tmp_path / "turned.jpg", height=128, width=96).int()
    assert (turned - torch.rot90(small, -1, (2, 3))).abs().max() <= 3


def test_picture_covers_the_size_and_is_cut_in_the_centre(tmp_path: Path) -> None:
    frames = np.zeros((2, 64, 128, 3), np.uint8)
    frames[:, :, 32:96] = [255, 0, 0]
    write_video(tmp_path / "a.mp4", frames, 24, crf=4)
    clip = read_clip(tmp_path / "a.mp4", indices=[0], height=32, width=32)[:, 0].int()
    assert (clip[0, :, 1:-1] > 240).all()
    assert (clip[1:, :, 1:-1] < 15).all()


def test_colours_survive(tmp_path: Path) -> None:
    frames = np.zeros((2, 64, 64, 3), np.uint8)
    colours = {(0, 0): [255, 0, 0], (0, 1): [0, 255, 0], (1, 0): [255, 255, 255], (1, 1): [0, 0, 255]}
    for (row, column), colour in colours.items():
        frames[:, row * 32 : row * 32 + 32, column * 32 : column * 32 + 32] = colour
    write_video(tmp_path / "a.mp4", frames, 24, crf=4)
    clip = read_clip(tmp_path / "a.mp4", indices=[1], height=32, width=32)[:, 0].int()
    for (row, column), colour in colours.items():
        assert (clip[:, row * 16 + 8, column * 16 + 8] - torch.tensor(colour)).abs().max() <= 6


def test_rotated_clip_is_turned_upright(tmp_path: Path) -> None:
    plain = make_clip(tmp_path / "a.mp4", height=48, width=64)
    turned = make_clip(tmp_path / "b.mp4", height=48, width=64, rotation=90)
    assert (probe_clip(turned).height, probe_clip(turned).width) == (64, 48)
    upright = read_clip(turned, indices=[5], height=64, width=48)[:, 0]
    assert torch.equal(upright, torch.rot90(read_clip(plain, indices=[5], height=48, width=64)[:, 0], 1, (1, 2)))


def test_odd_sizes_are_read(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.mp4", height=47, width=63, pix_fmt="yuv444p")
    assert (probe_clip(path).height, probe_clip(path).width) == (47, 63)
    assert numbers_in(read_clip(path, indices=[2, 9], height=32, width=32)) == [2, 9]


def test_header_facts(tmp_path: Path) -> None:
    facts = probe_clip(make_clip(tmp_path / "a.mp4", frames=13))
    assert (facts.kind, facts.height, facts.width, facts.frames, facts.fps, facts.codec) == (
        "video",
        48,
        64,
        13,
        24.0,
        "h264",
    )
    assert probe_clip(make_clip(tmp_path / "a.mkv", frames=13)).frames == 13


def cut(path: Path, share: float) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def text(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


@pytest.mark.parametrize("frames", [1, 20])
def test_a_clip_with_fewer_frames_than_wanted_is_refused(tmp_path: Path, frames: int) -> None:
    with pytest.raises(ClipError, match=f"bad.mp4: frame {frames} is not there"):
        read_clip(make_clip(tmp_path / "bad.mp4", frames=frames), indices=range(30), height=32, width=32)


def test_frames_before_a_cut_can_be_used(tmp_path: Path) -> None:
    path = cut(make_clip(tmp_path / "a.mp4", movflags="+faststart"), 0.8)
    assert numbers_in(read_clip(path, indices=[0, 1, 2], height=48, width=64)) == [0, 1, 2]


def test_large_pictures_are_refused_from_the_header(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.mp4")
    limits = DecodeLimits(max_pixels=48 * 64 - 1)
    with pytest.raises(ClipError, match="64x48 pixels in its header"):
        read_clip(path, indices=[0], height=32, width=32, limits=limits)
    data = bytearray(path.read_bytes())
    place = data.find(b"avc1", data.find(b"stsd")) + 28
    assert struct.unpack(">HH", data[place : place + 4]) == (64, 48)
    data[place : place + 4] = struct.pack(">HH", 16, 16)
    path.write_bytes(data)
    # The header now lies; the decoder itself must refuse.
    with pytest.raises(ClipError, match="cannot be read"):
        read_clip(path, indices=[0], height=32, width=32, limits=limits)
    assert read_clip(path, indices=[0], height=32, width=32).shape == (3, 1, 32, 32)


def test_declared_frames_and_length_are_refused_from_the_header(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.mp4")
    with pytest.raises(ClipError, match="declares 40 frames"):
        probe_clip(path, limits=DecodeLimits(max_frames=39))
    with pytest.raises(ClipError, match="more than 39 frames"):
        probe_clip(make_clip(tmp_path / "a.mkv"), limits=DecodeLimits(max_frames=39))
    with pytest.raises(ClipError, match="lasts 2 s"):
        probe_clip(path, limits=DecodeLimits(max_seconds=1))


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_images_are_read_covered_and_cut(tmp_path: Path, suffix: str) -> None:
    pixels = np.zeros((60, 120, 3), np.uint8)
    pixels[:, 30:90] = [0, 0, 255]
    path = tmp_path / f"a{suffix}"
    Image.fromarray(pixels).save(path, quality=95)
    facts = probe_image(path)
    assert (facts.kind, facts.height, facts.width, facts.frames, facts.fps) == ("image", 60, 120, 1, None)
    image = read_image(path, height=32, width=32)
    assert image.shape == (3, 1, 32, 32)
    assert (image[2, 0, :, 1:-1] > 230).all()
    assert (image[0, 0, :, 1:-1] < 30).all()


def test_sixteen_bit_gray_keeps_its_range(tmp_path: Path) -> None:
    Image.fromarray(np.full((16, 16), 128 * 256, np.uint16)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", height=16, width=16).unique().tolist() == [128]


def test_image_turned_by_exif_is_upright(tmp_path: Path) -> None:
    image = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8)[None, :, None] * 4, (32, 1, 3)))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.png", exif=exif)
    assert (probe_image(tmp_path / "a.png").height, probe_image(tmp_path / "a.png").width) == (64, 32)
    upright = read_image(tmp_path / "a.png", height=64, width=32)[0, 0].int()
    assert upright[0].float().mean() < upright[-1].float().mean()


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClipError, match="no known image extension"):
        read_image(text(tmp_path / "a.svg", "<svg/>"), height=32, width=32)
    with pytest.raises(ClipError, match="no known video extension"):
        probe_clip(text(tmp_path / "list.m3u8", "#EXTM3U"))
