"""Clips read one by one: listed from any source, with their own size and length unless told otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from frameloom.core.errors import ConfigError, DataError
from frameloom.data.loading.clip_view import ClipView, list_clips, view_clip
from frameloom.data.media.decode import read_clip
from frameloom.data.media.writing import write_image, write_video


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    write_video(tmp_path / "a" / "one.mp4", rng.integers(0, 255, (11, 46, 62, 3), dtype=np.uint8), 24)
    write_image(tmp_path / "b" / "two.png", rng.integers(0, 255, (40, 33, 3), dtype=np.uint8))
    return tmp_path


def test_a_file_a_folder_and_a_table_list_the_same_clips(folder: Path) -> None:
    (folder / "list.txt").write_text("a/one.mp4\nb/two.png\n")
    pl.DataFrame({"path": ["a/one.mp4", "b/two.png"]}).write_csv(folder.parent / "t.csv")
    inside = list_clips(folder / "a" / "one.mp4")
    assert [clip.name for clip in inside] == ["one.mp4"]
    listed = list_clips(folder / "list.txt")
    assert [clip.name for clip in listed] == ["a/one.mp4", "b/two.png"]
    (folder / "list.txt").unlink()
    assert list_clips(folder) == listed
    assert [clip.name for clip in list_clips(folder.parent / "t.csv", root=folder)] == ["a/one.mp4", "b/two.png"]
    first = list_clips(folder)[0]
    assert first.root / first.path == folder / "a" / "one.mp4"


def test_tables_beside_the_clips_of_a_folder_are_not_read(folder: Path) -> None:
    pl.DataFrame({"psnr_db": [1.0]}).write_parquet(folder / "metrics.parquet")
    assert [clip.name for clip in list_clips(folder)] == ["a/one.mp4", "b/two.png"]


def test_a_clip_keeps_its_size_and_length(folder: Path) -> None:
    video, image = (view_clip(clip, ClipView()) for clip in list_clips(folder))
    assert video.pixels_CFHW.shape == (3, 11, 46, 62) and video.fps == 24
    assert image.pixels_CFHW.shape == (3, 1, 40, 33) and image.fps is None


def test_a_view_takes_the_frames_and_pixels_it_names(folder: Path) -> None:
    clip = list_clips(folder)[0]
    viewed = view_clip(clip, ClipView(frames=4, sample_rate=2))
    expected = read_clip(folder / "a" / "one.mp4", indices=[0, 2, 4, 6], height=46, width=62)
    assert (viewed.pixels_CFHW == expected).all() and viewed.fps == 12
    other = read_clip(folder / "a" / "one.mp4", indices=[0, 1, 2, 3], height=46, width=62)
    assert (viewed.pixels_CFHW != other).any()


def test_sizes_are_cut_in_the_middle_to_what_divides_them(folder: Path) -> None:
    clip = list_clips(folder)[0]
    cut = view_clip(clip, ClipView(frames=1), multiples=(8, 8)).pixels_CFHW
    whole = view_clip(clip, ClipView(frames=1)).pixels_CFHW
    assert cut.shape == (3, 1, 40, 56)
    assert (cut == whole[:, :, 3:43, 3:59]).all()
    assert view_clip(clip, ClipView(short_side=32), multiples=(8, 8)).pixels_CFHW.shape[2:] == (32, 40)
    assert view_clip(clip, ClipView(height=24, width=16)).pixels_CFHW.shape[2:] == (24, 16)


def test_usable_frames_decide_the_length(folder: Path) -> None:
    clip = list_clips(folder)[0]
    viewed = view_clip(clip, ClipView(), usable_frames=lambda available: available // 4 * 4 + 1)
    assert viewed.pixels_CFHW.shape[1] == 9


def test_a_row_with_a_window_begins_there(folder: Path) -> None:
    table = {"path": ["a/one.mp4", "a/one.mp4"], "start_frame": [4, 20], "frames": [3, 3]}
    pl.DataFrame(table).write_parquet(folder / "m.parquet")
    inside, behind = list_clips(folder / "m.parquet")
    viewed = view_clip(inside, ClipView()).pixels_CFHW
    assert (viewed == read_clip(folder / "a" / "one.mp4", indices=[4, 5, 6], height=46, width=62)).all()
    assert inside.name == "a/one-frame4.mp4"
    with pytest.raises(DataError, match="begins at frame 20"):
        view_clip(behind, ClipView())


def test_a_clip_that_is_too_small_is_refused_with_a_way_out(folder: Path) -> None:
    with pytest.raises(DataError, match="--short-side"):
        view_clip(list_clips(folder)[1], ClipView(), multiples=(64, 64))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"height": 8}, "go together"),
        ({"height": 8, "width": 8, "short_side": 8}, "leave one"),
        ({"frames": 0}, "--frames is 0"),
        ({"sample_rate": -1}, "--sample-rate is -1"),
    ],
)
def test_views_that_contradict_themselves_are_refused(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClipView(**fields)
