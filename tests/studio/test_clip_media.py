"""Pictures and playback of clips: only from below the root, and always something a browser can play."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import av
import numpy as np
import polars as pl
import pytest

from frameloom.core.errors import DataError
from frameloom.data.media.decode import probe_clip
from frameloom.data.media.writing import write_image, write_video
from frameloom.studio.data.clip_table import ClipShelf
from frameloom.studio.data.clips import ClipMedia, show_clip, show_page
from frameloom.studio.server.context import StudioContext

FRAMES = np.zeros((12, 48, 64, 3), np.uint8)


def write_avi(path: Path) -> None:
    with av.open(str(path), "w", format="avi") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for frame in FRAMES:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


@pytest.fixture
def shown(tmp_path):
    """(context, open manifest, its media): a clip, a picture, an avi, a part of a clip, and a way out."""
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    (root / "set").mkdir(parents=True)
    scratch.mkdir()
    write_video(root / "set" / "a.mp4", FRAMES, 8, preset="ultrafast")
    write_image(root / "set" / "b.png", FRAMES[0])
    write_avi(root / "set" / "c.avi")
    write_video(tmp_path / "secret.mp4", FRAMES, 8, preset="ultrafast")
    (root / "set" / "out.mp4").symlink_to(tmp_path / "secret.mp4")
    rows = [
        *(("a.mp4", "<b>bold</b> {{x}} ${y}", "video", 12, 8.0, None), ("b.png", "", "image", 1, None, None)),
        *(("c.avi", "c", "video", 12, 8.0, None), ("a.mp4", "part", "video", 5, 8.0, 4)),
        *(("out.mp4", "out", "video", 12, 8.0, None), ("gone.mp4", "gone", "video", 12, 8.0, None)),
    ]
    names = ["path", "caption", "kind", "frames", "fps", "start_frame"]
    table = pl.DataFrame(rows, schema=names, orient="row").with_columns(height=48, width=64)
    table = table.with_columns(end_frame=pl.col("start_frame") + pl.col("frames"))
    table.write_parquet(root / "set" / "manifest.parquet")
    context, shelf = StudioContext(root.resolve(), scratch.resolve()), ClipShelf()
    return context, shelf.open(context.root / "set" / "manifest.parquet"), ClipMedia(context, shelf)


def test_what_a_browser_can_play_is_played_as_it_is(shown):
    _, table, media = shown
    assert media.play_url(table, 0)[0].startswith("/files/set/a.mp4?v=") and media.play_url(table, 0)[1]
    assert media.play_url(table, 1)[0].startswith("/files/set/b.png?v=") and not media.play_url(table, 1)[1]


@pytest.mark.parametrize(("row", "frames"), [(2, 12), (3, 5)])
def test_other_codecs_and_parts_of_clips_are_played_as_a_copy(shown, row, frames):
    context, table, media = shown
    url, is_video = media.play_url(table, row)
    copy = Path(unquote(url.removeprefix("/gradio_api/file=")))
    assert is_video and copy.is_relative_to(context.scratch)
    facts = probe_clip(copy)
    assert (facts.codec, facts.frames, facts.height, facts.width) == ("h264", frames, 48, 64)
    assert media.play_url(table, row)[0] == url


def test_a_clip_outside_the_root_is_not_shown(shown):
    _, table, media = shown
    with pytest.raises(DataError):
        media.play_url(table, 4)
    assert media.thumb(table.key, 4) is None and 'role="alert"' in show_clip(table, 4, media)


def test_pictures_are_jpeg_and_missing_files_have_none(shown):
    _, table, media = shown
    assert all((media.thumb(table.key, row) or b"").startswith(b"\xff\xd8") for row in (0, 1, 2, 3))
    assert media.thumb(table.key, 5) is None and media.thumb(table.key, 99) is None and media.thumb("0" * 24, 0) is None


def test_captions_are_shown_as_text_and_not_as_markup(shown):
    _, table, _ = shown
    from frameloom.studio.data.clip_table import ClipFilter

    page = show_page(table, table.page(ClipFilter(), 0), {1: "<i>new</i>"}, chosen=0)
    assert "&lt;b&gt;bold" in page and "&lt;i&gt;new" in page
    assert "<b>bold" not in page and "{{" not in page and "${" not in page
