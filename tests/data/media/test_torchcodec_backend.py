"""The other decoder gives the same frames; without its package it says what to install."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from frameloom.core.errors import MissingExtra
from frameloom.data.loading.reader import pick_decoder
from frameloom.data.media import decode
from frameloom.data.media.decode import ClipError, DecodeLimits
from frameloom.data.media.transforms import ResizeCrop

HAS_TORCHCODEC = importlib.util.find_spec("torchcodec") is not None
needs_torchcodec = pytest.mark.skipif(not HAS_TORCHCODEC, reason="torchcodec is not installed")
INDICES = [0, 3, 3, 47, 60, 61, 89]


def make_clip(path: Path, *, rotation: float | None = None, uneven: bool = False, codec: str = "libx264") -> Path:
    options = {"crf": "4", "preset": "veryfast", "bf": "2"} if codec == "libx264" else {"qscale": "1", "bf": "1"}
    noise = np.random.default_rng(0).integers(0, 60, (48, 64, 1))
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=24, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.gop_size = 12
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number in range(90):
            frame = av.VideoFrame.from_ndarray(np.tile((noise + 2 * number).astype(np.uint8), 3), "rgb24")
            frame.pts, frame.time_base = number + (number // 7 if uneven else 0), Fraction(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.skipif(HAS_TORCHCODEC, reason="torchcodec is installed")
def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingExtra, match=r"pip install 'frameloom\[torchcodec\]'"):
        pick_decoder("torchcodec")(make_clip(tmp_path / "a.mp4"), indices=[0], height=48, width=64)


def test_the_default_decoder_is_pyav() -> None:
    assert pick_decoder("pyav") is decode.read_clip


@needs_torchcodec
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("even.mp4", {}),
        ("uneven.mp4", {"uneven": True}),
        ("turned.mp4", {"rotation": 90}),
        ("matroska.mkv", {}),
        ("no_times.avi", {"codec": "mpeg4"}),
    ],
)
def test_both_decoders_give_the_same_frames(tmp_path: Path, name: str, kwargs: dict) -> None:
    path = make_clip(tmp_path / name, **kwargs)
    read = pick_decoder("torchcodec")
    for height, width in ((48, 64), (32, 32)):
        ours = decode.read_clip(path, indices=INDICES, height=height, width=width).int()
        theirs = read(path, indices=INDICES, height=height, width=width).int()
        assert ours.shape == theirs.shape == (3, len(INDICES), height, width)
        assert (ours - theirs).abs().float().mean() < 1.5
        assert (ours - theirs.roll(1, dims=1)).abs().float().mean() > 3


@needs_torchcodec
def test_places_and_limits_are_kept(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.mp4")
    read = pick_decoder("torchcodec")
    place = ResizeCrop(48, 64, 5, 11)
    cut = read(path, indices=[4], height=24, width=16, place=lambda height, width: place)
    whole = read(path, indices=[4], height=48, width=64)
    assert (cut.int() - whole[:, :, 5:29, 11:27].int()).abs().max() <= 1
    with pytest.raises(ClipError, match="frame 90 is not there"):
        read(path, indices=[90], height=48, width=64)
    with pytest.raises(ClipError, match="64x48 pixels in its header"):
        read(path, indices=[0], height=48, width=64, limits=DecodeLimits(max_pixels=1000))
    script = tmp_path / "script.mp4"
    script.write_text("ffconcat version 1.0\nfile 'a.mp4'\n")
    with pytest.raises(ClipError, match=r"script\.mp4"):
        read(script, indices=[0], height=48, width=64)
