"""Filters and pages of a manifest, and new captions in a new one."""

from __future__ import annotations

import polars as pl
import pytest

from frameloom.core.errors import DataError
from frameloom.core.files import digest_file
from frameloom.data.manifest.manifest import Manifest, write_manifest
from frameloom.data.manifest.sources.reading import Source
from frameloom.studio.data.clip_table import (
    PAGE_ROWS,
    ClipFilter,
    ClipShelf,
    ClipTable,
    apply_edits,
    free_name,
    write_edited,
)
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
    return ClipShelf().open(folder / "manifest.parquet")


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
    shelf = ClipShelf()
    first = shelf.open(folder / "manifest.parquet")
    assert shelf.open(folder / "manifest.parquet") is first and shelf.find(first.key) is first
    write_manifest(folder / "manifest.parquet", first.table.head(5))
    assert shelf.open(folder / "manifest.parquet").table.height == 5


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
