"""Writing media: real files, read back."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from frameloom.core.errors import DataError
from frameloom.core.random import numpy_stream
from frameloom.data.media.writing import contact_sheet, read_metadata, write_gif, write_image, write_video, write_webm

MP4 = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2"}


def make_frames(num_frames: int = 5, height: int = 48, width: int = 64) -> NDArray[np.uint8]:
    frames = np.full((num_frames, height, width, 3), 120, np.uint8)
    for i in range(num_frames):
        frames[i, 8:28, 6 + 4 * i : 26 + 4 * i] = (224, 48, 48)
    frames[:, 32:44, 8:40] = (48, 88, 232)
    return frames


def read_frames(path: Path) -> NDArray[np.uint8]:
    with av.open(str(path), options=MP4) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_video_comes_back_with_its_frames_colours_and_rate(tmp_path: Path) -> None:
    frames = make_frames()
    write_video(tmp_path / "clip.mp4", frames, 12)
    back = read_frames(tmp_path / "clip.mp4")
    assert back.shape == frames.shape
    assert np.abs(back.astype(int) - frames).mean() < 3
    assert np.abs(back[:, 36:40, 16:32].astype(int) - (48, 88, 232)).max() < 10
    assert np.abs(back[::-1].astype(int) - frames).mean() > 6  # frames in another order are not close
    with av.open(str(tmp_path / "clip.mp4"), options=MP4) as container:
        video = container.streams.video[0]
        assert (video.average_rate, video.frames, video.pix_fmt, video.codec_context.name) == (12, 5, "yuv420p", "h264")


def test_fractional_rate_stays_exact(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", make_frames(), 24000 / 1001)
    with av.open(str(tmp_path / "clip.mp4"), options=MP4) as container:
        assert container.streams.video[0].average_rate == Fraction(24000, 1001)


def test_same_frames_give_the_same_bytes_and_others_do_not(tmp_path: Path) -> None:
    frames = make_frames()
    write_video(tmp_path / "a.mp4", frames, 8, metadata={"prompt": "x"})
    write_video(tmp_path / "b.mp4", frames, 8, metadata={"prompt": "x"})
    write_video(tmp_path / "c.mp4", frames[::-1], 8, metadata={"prompt": "x"})
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    assert (tmp_path / "a.mp4").read_bytes() != (tmp_path / "c.mp4").read_bytes()


def test_index_stands_before_the_frames(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", make_frames(), 8)
    content = (tmp_path / "clip.mp4").read_bytes()
    assert 0 < content.index(b"moov") < content.index(b"mdat")


@pytest.mark.parametrize("name", ["clip.mp4", "clip.webm", "clip.gif", "picture.png"])
def test_metadata_survives(tmp_path: Path, name: str) -> None:
    metadata = {"prompt": 'ein "roter" Kreis = größer\nals\\zuvor 圆', "seed": "7"}
    if name == "picture.png":
        write_image(tmp_path / name, make_frames()[0], metadata=metadata)
    else:
        write = {".mp4": write_video, ".webm": write_webm, ".gif": write_gif}[Path(name).suffix]
        write(tmp_path / name, make_frames(), 8, metadata=metadata)
    assert read_metadata(tmp_path / name) == metadata


def test_file_without_our_metadata_has_none(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", make_frames(), 8)
    write_image(tmp_path / "picture.png", make_frames()[0])
    assert read_metadata(tmp_path / "clip.mp4") == read_metadata(tmp_path / "picture.png") == {}


@pytest.mark.parametrize("name", ["clip.mp4", "clip.webm", "clip.gif", "picture.png"])
def test_metadata_of_another_kind_of_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("ffconcat version 1.0\nfile other.mp4\n")
    with pytest.raises(DataError, match="not a readable"):
        read_metadata(tmp_path / name)


def test_a_gif_has_all_frames_at_their_rate() -> None:
    frames, file = np.stack([np.full((8, 8, 3), value, np.uint8) for value in (0, 100, 200)]), io.BytesIO()
    write_gif(file, frames, 8)
    with Image.open(file) as image:
        assert image.n_frames == 3 and image.info["duration"] == 120
        image.seek(2)
        assert abs(int(np.asarray(image.convert("RGB"))[0, 0, 0]) - 200) <= 2


def test_odd_size_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"63x48 pixels.*even"):
        write_video(tmp_path / "clip.mp4", make_frames(width=63), 8)
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    write_video(path, make_frames(), 8)
    before = path.read_bytes()
    with pytest.raises(av.error.FFmpegError):
        write_video(path, make_frames(), 8, preset="no-such-preset")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["clip.mp4"]


def test_wrong_frames_and_rates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="uint8"):
        write_video(tmp_path / "clip.mp4", make_frames().astype(np.float32), 8)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no frames"):
        write_video(tmp_path / "clip.mp4", make_frames()[:0], 8)
    with pytest.raises(DataError, match="frame rate"):
        write_video(tmp_path / "clip.mp4", make_frames(), 0)


def test_image_keeps_every_pixel(tmp_path: Path) -> None:
    pixels = numpy_stream(0, "test-image").integers(0, 256, (31, 17, 3), dtype=np.uint8)
    write_image(tmp_path / "picture.png", pixels)
    with Image.open(tmp_path / "picture.png") as image:
        assert np.array_equal(np.asarray(image), pixels)


def test_contact_sheet_shows_every_clip_and_label() -> None:
    rows = [list(make_frames(12)), list(make_frames(1, 96, 48))]
    sheet = contact_sheet(rows, ["a red square", "a picture"], frame_height_px=48)
    others = contact_sheet(rows, ["a red square", "another picture"], frame_height_px=48)
    red = (np.abs(sheet.astype(int) - (224, 48, 48)).max(axis=-1) < 8).sum()
    assert red > 0.9 * 20 * 20 * 9  # nine frames of the long clip at its own size, and the picture
    assert tuple(sheet[0, 0]) == (24, 24, 27)
    assert not np.array_equal(sheet[:, :200], others[:, :200])


def test_contact_sheet_fills_columns_and_cuts_long_labels() -> None:
    rows = [list(make_frames(2))] * 5
    one = contact_sheet(rows, ["label"] * 5)
    two = contact_sheet(rows, ["label"] * 5, num_columns=2)
    assert two.shape[0] < one.shape[0]
    assert two.shape[1] == 2 * one.shape[1]
    assert contact_sheet(rows[:1], ["word " * 300]).shape[1] < 600
