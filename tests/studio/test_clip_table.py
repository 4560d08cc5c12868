"""Clips of a manifest: filters, pages, pictures and players, and new captions in a new manifest."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import av
import numpy as np
import polars as pl
import pytest

from frameloom.core.errors import DataError
from frameloom.core.files import digest_file
from frameloom.data.manifest.manifest import Manifest, write_manifest
from frameloom.data.manifest.sources.reading import Source
from frameloom.data.media.decode import probe_clip
from frameloom.data.media.writing import write_image, write_video
from frameloom.studio.data.clip_table import (
    PAGE_ROWS,
    ClipFilter,
    ClipTable,
    apply_edits,
    free_name,
    write_edited,
)
from frameloom.studio.data.clips import ClipMedia, show_clip, show_page
from frameloom.studio.recipe.files import list_manifests
from frameloom.studio.server.context import StudioContext


@pytest.fixture
def folder(tmp_path):
    rows = {
        "path": [f"clips/{number}.mp4" for number in range(60)],
        "caption": [f"A {'red' if number % 3 else 'blue'} thing number {number}" for number in range(60)],
        "kind": ["image" if number % 10 == 0 else "video" for number in range(60)],
        "height": [64 + number for number in range(60)],
        "width": [128] * 60,
        "frames": [1 if number % 10 == 0 else number for number in range(60)],
        "fps": [None if number % 10 == 0 else 8.0 + number % 2 for number in range(60)],
        "split": ["train" if number % 2 else "heldout" for number in range(60)],
    }
    write_manifest(tmp_path / "manifest.parquet", pl.DataFrame(rows))
    return tmp_path.resolve()


@pytest.fixture
def table(folder):
    return ClipMedia(StudioContext(folder, folder)).open(folder / "manifest.parquet")


@pytest.mark.parametrize(
    ("wanted", "keeps"),
    [
        (ClipFilter(), lambda n: True),
        (ClipFilter(text="BLUE"), lambda n: n % 3 == 0),
        (ClipFilter(text="clips/7"), lambda n: n == 7),
        (ClipFilter(text=".*"), lambda n: False),
        (ClipFilter(kind="image"), lambda n: n % 10 == 0),
        (ClipFilter(frames=(20, 30)), lambda n: n % 10 and 20 <= n <= 30),
        (ClipFilter(side=(100, None)), lambda n: 64 + n >= 100),
        (ClipFilter(fps=(None, 8)), lambda n: n % 10 and n % 2 == 0),
        (ClipFilter(where='split == "train" and height > 80'), lambda n: n % 2 and 64 + n > 80),
    ],
)
def test_a_filter_keeps_the_rows_it_names(table, wanted, keeps):
    assert table.find(wanted).tolist() == [number for number in range(60) if keeps(number)]


def test_a_wrong_filter_is_told(table):
    with pytest.raises(DataError, match="splitt"):
        table.find(ClipFilter(where="splitt == 1"))


def test_pages_cover_every_row_once_and_stay_inside(table):
    pages = [table.page(ClipFilter(), number) for number in range(3)]
    assert [row for page in pages for row in page.rows["row"]] == list(range(60))
    assert table.page(ClipFilter(), 99).number == 2 and table.page(ClipFilter(), -1).number == 0
    assert table.page(ClipFilter(text="nothing like it"), 5).num_rows == 0


def test_a_million_rows_are_paged(tmp_path):
    rows = pl.select(path=pl.int_range(1_000_000).cast(pl.String)).with_columns(
        caption=pl.format("caption {}", "path"), kind=pl.lit("video"), height=64, width=64, frames=9, fps=8.0
    )
    table = ClipTable(tmp_path / "m.parquet", Source(rows, tmp_path, "parquet"), "key")
    page = table.page(ClipFilter(text="caption 99999"), 0)
    assert page.num_rows == 11 and page.rows["row"].to_list()[-1] == 999_999
    last = table.page(ClipFilter(), 10**9)
    assert last.rows["row"].to_list()[-1] == 999_999 and last.rows.height == 1_000_000 % PAGE_ROWS


def test_a_changed_manifest_is_read_again(folder, table):
    media = ClipMedia(StudioContext(folder, folder))
    first = media.open(folder / "manifest.parquet")
    assert media.open(folder / "manifest.parquet") is first
    write_manifest(folder / "manifest.parquet", first.table.head(5))
    assert media.open(folder / "manifest.parquet").table.height == 5


def test_new_captions_go_into_a_new_manifest_and_the_old_one_stays(folder, table):
    before = digest_file(table.path)
    written = write_edited(table, {3: "three", 59: "fifty-nine"}, "edited")
    assert written == folder / "edited.parquet" and digest_file(table.path) == before
    captions = Manifest.read(written).column("caption").to_list()
    assert (captions[3], captions[59]) == ("three", "fifty-nine")
    others = [number for number in range(60) if number not in (3, 59)]
    assert [captions[number] for number in others] == [table.table["caption"][number] for number in others]
    assert Manifest.read(written).fingerprint != Manifest.read(table.path).fingerprint


@pytest.mark.parametrize("name", ["manifest", "manifest.parquet", "../up", "a/b", ".hidden", "", "/tmp/x", "a\0"])
def test_no_manifest_is_overwritten_and_no_other_folder_written(folder, table, name):
    with pytest.raises(DataError):
        write_edited(table, {0: "x"}, name)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.parquet"]


def test_nothing_is_written_without_a_change_and_names_are_free(folder, table):
    with pytest.raises(DataError, match="no caption was changed"):
        write_edited(table, {}, "edited")
    write_edited(table, {0: "x"}, free_name(table.path))
    assert free_name(table.path) == "manifest-edited-2.parquet"


def test_an_edited_row_loses_its_other_captions():
    table = pl.DataFrame({"caption": ["a", "b"], "captions": [["a", "c"], ["b", "d"]]})
    edited = apply_edits(table, {1: "new"})
    assert edited["caption"].to_list() == ["a", "new"] and edited["captions"].to_list() == [["a", "c"], None]
    assert table["caption"].to_list() == ["a", "b"]


def test_manifests_are_told_from_other_tables(folder):
    pl.DataFrame({"path": ["a"], "reason": ["x"], "error": ["y"]}).write_parquet(folder / "manifest.errors.parquet")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n')
    (folder / "list.jsonl").write_text('{"file_path": "a.mp4", "text": "x"}\n')
    (folder / "list.csv").write_text("path,caption\na.mp4,x\n")
    (folder / "broken.parquet").write_bytes(b"PAR1 no")
    context = StudioContext(folder, folder)
    assert list_manifests(context) == ["list.csv", "list.jsonl", "manifest.parquet"]


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
    context = StudioContext(root.resolve(), scratch.resolve())
    media = ClipMedia(context)
    return context, media.open(context.root / "set" / "manifest.parquet"), media


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
