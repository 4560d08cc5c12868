from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import frameloom.data.manifest.rows as table_rows
from frameloom.config.schema.data import SourceSection
from frameloom.core.errors import DataError
from frameloom.data.manifest.manifest import (
    Manifest,
    Share,
    rows_in_epoch,
    samples_per_source,
    write_manifest,
)

GOOD = {
    "path": ["a/1.mp4", "a/2.mp4", "b/3.png"],
    "caption": ["one", "two", "drei ü"],
    "kind": ["video", "video", "image"],
    "height": [64, 48, 32],
    "width": [64, 80, 32],
    "frames": [10, 20, 1],
    "fps": [24.0, 29.97, None],
    "split": ["train", "test", "train"],
}


def source_at(path: Path, **options: Any) -> SourceSection:
    return SourceSection(path=str(path), **options)


def write(path: Path, /, **changes: list[object]) -> Path:
    pl.DataFrame(GOOD | changes).write_parquet(path)
    return path


def test_columns_and_rows_come_back(tmp_path: Path) -> None:
    manifest = Manifest.read(write(tmp_path / "m.parquet"))
    assert len(manifest) == 3
    assert manifest.height.tolist() == [64, 48, 32]
    assert np.isnan(manifest.fps[2])
    assert manifest.clip(1) == (1, "a/2.mp4", "two", "video", 48, 80, 20, 29.97)
    assert manifest.clip(2).fps is None
    assert manifest.captions([2, 0]) == ["drei ü", "one"]
    assert manifest.file(0) == tmp_path / "a/1.mp4"
    assert manifest.column("split").to_list() == ["train", "test", "train"]


def test_root_can_be_another_folder(tmp_path: Path) -> None:
    manifest = Manifest.read(write(tmp_path / "m.parquet"), root=tmp_path / "media")
    assert manifest.file(0) == tmp_path / "media/a/1.mp4"


def test_where_keeps_matching_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "m.parquet")
    assert [Manifest.read(path, where={"split": "train"}).clip(i).path for i in (0, 1)] == ["a/1.mp4", "b/3.png"]
    assert len(Manifest.read(path, where={"split": ["train", "test"], "kind": "video"})) == 2
    with pytest.raises(DataError, match="did you mean 'split'"):
        Manifest.read(path, where={"splitt": "train"})
    with pytest.raises(DataError, match="no row has split = 'valid'"):
        Manifest.read(path, where={"split": "valid"})
    assert Manifest.read(path, where="split == 'train' and frames > 1").captions([0]) == ["one"]


def test_wrong_rows_that_the_filter_leaves_out_do_no_harm_and_others_keep_their_number(tmp_path: Path) -> None:
    path = write(tmp_path / "m.parquet", caption=[None, "two", "three"], height=[64, 48, 0])
    with pytest.raises(DataError, match="row 0, column 'caption'"):
        Manifest.read(path)
    with pytest.raises(DataError, match="row 2, column 'height'"):
        Manifest.read(path, where="caption is not null")
    assert len(Manifest.read(path, where="caption is not null and height > 0")) == 1


def test_sources_follow_each_other_and_keep_their_roots(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    write(tmp_path / "one/m.parquet")
    (tmp_path / "two/n.csv").write_text(
        "path,text,num_frames,height,width,fps\nx.mp4,ex,9,64,64,24\ny.png,why,1,8,8,\n"
    )
    specs = [
        source_at(tmp_path / "one/m.parquet", where={"split": "train"}),
        source_at(tmp_path / "two/n.csv"),
    ]
    both = Manifest.read_sources(specs)
    assert len(both) == 4
    assert both.captions(range(4)) == ["one", "drei ü", "ex", "why"]
    assert both.frames.tolist() == [10, 1, 9, 1] and both.height.dtype == np.int32
    assert both.file(1) == tmp_path / "one/b/3.png" and both.file(2) == tmp_path / "two/x.mp4"
    assert both.column("split").to_list() == ["train", "train", None, None]
    assert both.clip(3) == (3, "y.png", "why", "image", 8, 8, 1, None)
    again = pickle.loads(pickle.dumps(both))
    assert again.fingerprint == both.fingerprint and again.file(2) == both.file(2)
    assert len(Manifest.read_sources(specs, where="kind == 'image'")) == 2
    assert Manifest.read_sources(specs[::-1]).fingerprint != both.fingerprint
    doubled = [specs[0], source_at(tmp_path / "two/n.csv", repeat=2)]
    assert Manifest.read_sources(doubled).fingerprint != both.fingerprint
    # A recipe that a person wrote has 2, the one in the folder of its run 2.0.
    written = [specs[0], source_at(tmp_path / "two/n.csv", repeat=2.0)]
    assert Manifest.read_sources(written).fingerprint == Manifest.read_sources(doubled).fingerprint
    with pytest.raises(IndexError):
        both.clip(4)


def test_plain_sources_show_every_row_once_in_every_epoch(tmp_path: Path) -> None:
    manifest = Manifest.read(write(tmp_path / "m.parquet"))
    assert (
        rows_in_epoch([part.share for part in manifest.parts], 7, 0).tolist()
        == rows_in_epoch([part.share for part in manifest.parts], 8, 5).tolist()
        == [0, 1, 2]
    )


def test_a_repeat_of_two_shows_every_row_twice_and_of_a_half_one_half_after_the_other() -> None:
    twice = rows_in_epoch([Share(3), Share(2, repeat=2)], 1, 4)
    assert twice.tolist() == [0, 1, 2, 3, 3, 4, 4]
    halves = [set(rows_in_epoch([Share(100, repeat=0.5)], 1, epoch).tolist()) for epoch in range(4)]
    assert all(len(half) == 50 for half in halves)
    assert halves[0] | halves[1] == set(range(100)) and halves[0] == halves[2]
    assert halves[0] != set(rows_in_epoch([Share(100, repeat=0.5)], 2, 0).tolist())  # another seed, another half


def test_rows_of_a_source_are_shown_equally_often_over_epochs() -> None:
    shares = [Share(7, repeat=2.3), Share(11, repeat=0.4)]
    counts = sum(np.bincount(rows_in_epoch(shares, 3, epoch), minlength=18) for epoch in range(9))
    assert np.ptp(counts[:7]) <= 1 and np.ptp(counts[7:]) <= 1 and counts.min() > 0


def test_weights_are_shares_of_an_epoch_that_keeps_its_length() -> None:
    shares = [Share(1000, weight=1), Share(10, weight=3)]
    assert sum(samples_per_source(shares)) == 1010
    rows = rows_in_epoch(shares, 5, 2)
    assert len(rows) == 1010
    assert (rows >= 1000).sum() == samples_per_source(shares)[1]
    assert abs((rows >= 1000).mean() - 0.75) < 0.001
    equal = [Share(10, weight=2), Share(10, weight=2), Share(10, weight=2)]
    assert samples_per_source(equal) == [10, 10, 10]
    with pytest.raises(ValueError, match="all sources have a weight or none"):
        samples_per_source([Share(1, weight=1), Share(1)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": ["a", "../x.mp4", "c"]}, r"row 1, column 'path'.*leaves the root"),
        ({"path": ["a", "b", "/etc/passwd"]}, r"row 2, column 'path'.*absolute"),
        ({"path": ["http://host/a.mp4", "b", "c"]}, r"row 0, column 'path'.*scheme"),
        ({"path": ["a\0b", "b", "c"]}, r"row 0, column 'path'.*null byte"),
        ({"caption": ["x", None, "y"]}, r"row 1, column 'caption': None must not be null"),
        ({"kind": ["video", "film", "image"]}, r"row 1, column 'kind': 'film' must be"),
        ({"height": [64, 0, 32]}, r"row 1, column 'height': 0 must be"),
        ({"width": [64, 2**40, 32]}, r"row 1, column 'width'"),
        ({"frames": [10, 20, 2]}, r"row 2, column 'frames': 2 must be 1 for an image"),
        (
            {"fps": [24.0, None, None]},
            r"fps is missing in 1 of 3 rows \(first: row 1\).*frameloom data scan .*m.parquet",
        ),
        ({"fps": [24.0, float("nan"), None]}, r"fps is missing in 1 of 3 rows \(first: row 1\)"),
        ({"fps": [-1.0, 24.0, None]}, r"row 0, column 'fps'"),
        ({"fps": [24.0, 24.0, 24.0]}, r"row 2, column 'fps': 24.0 must be null for an image"),
        ({"height": ["64", "48", "32"]}, r"column 'height' has type String; it must hold whole numbers"),
        ({"caption": [1, 2, 3]}, r"column 'caption' has type Int64; it must hold text"),
        ({"captions": ["one;uno", "two", "drei"]}, r"column 'captions' has type String; it must hold a list of texts"),
        ({"captions": [[1], [2], [3]]}, r"column 'captions' has type List\(Int64\); it must hold a list of texts"),
    ],
)
def test_wrong_values_are_named_by_row_and_column(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Manifest.read(write(tmp_path / "m.parquet", **changes))


def test_a_row_chooses_among_its_captions_and_has_one_if_it_lists_none(tmp_path: Path) -> None:
    manifest = Manifest.read(write(tmp_path / "m.parquet", captions=[["one", None, "uno"], [], None]))
    assert [manifest.all_captions(row) for row in range(3)] == [["one", "uno"], ["two"], ["drei ü"]]
    for nothing in (None, []):
        manifest = Manifest.read(write(tmp_path / "m.parquet", captions=[nothing] * 3))
        assert manifest.all_captions(1) == ["two"]


def test_missing_columns_are_refused(tmp_path: Path) -> None:
    pl.DataFrame(GOOD).drop("fps").write_parquet(tmp_path / "m.parquet")
    with pytest.raises(DataError, match=r"fps is missing in 2 of 3 rows.*frameloom data scan"):
        Manifest.read(tmp_path / "m.parquet")
    pl.DataFrame(GOOD).drop("path").write_parquet(tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"no column names the files.*name it 'path'"):
        Manifest.read(tmp_path / "p.parquet")
    with pytest.raises(DataError, match="no column 'fps'"):
        write_manifest(tmp_path / "w.parquet", pl.DataFrame(GOOD).drop("fps"))


def test_symbolic_link_out_of_the_root_is_refused_when_opened(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (tmp_path / "secret.mp4").write_text("x")
    (root / "a/1.mp4").symlink_to(tmp_path / "secret.mp4")
    manifest = Manifest.read(write(root / "m.parquet"))
    with pytest.raises(DataError, match="row 0"):
        manifest.file(0)


def test_fingerprint_depends_on_content_not_on_encoding(tmp_path: Path) -> None:
    first = Manifest.read(write(tmp_path / "m.parquet")).fingerprint
    pl.DataFrame(GOOD).write_parquet(tmp_path / "n.parquet", compression="uncompressed", row_group_size=1)
    assert Manifest.read(tmp_path / "n.parquet").fingerprint == first
    other_split = write(tmp_path / "s.parquet", split=["x", "y", "z"])
    assert Manifest.read(other_split).fingerprint == first


@pytest.mark.parametrize(
    "changes",
    [
        {"caption": ["onet", "wo", "drei ü"]},
        {"path": ["a/1.mp4", "a/4.mp4", "b/3.png"]},
        {"fps": [24.0, 30.0, None]},
        {"height": [64, 48, 33]},
        {"sha256": ["1", "2", "3"]},
        {"start_frame": [0, 1, None], "end_frame": [10, 21, None]},
        {"captions": [["one", "uno"], ["two"], ["drei ü"]]},
    ],
)
def test_fingerprint_changes_with_what_is_trained_on(tmp_path: Path, changes: dict) -> None:
    assert (
        Manifest.read(write(tmp_path / "a.parquet", **changes)).fingerprint
        != Manifest.read(write(tmp_path / "b.parquet")).fingerprint
    )


@pytest.mark.parametrize("inline_bytes", [0, 2**20])
def test_pickled_manifest_is_the_same(tmp_path: Path, inline_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "INLINE_BYTES", inline_bytes)
    manifest = Manifest.read(write(tmp_path / "m.parquet"))
    copy = pickle.loads(pickle.dumps(manifest))
    assert copy.fingerprint == manifest.fingerprint
    assert copy.clip(2) == manifest.clip(2)
    assert copy.root == manifest.root


def test_spilled_table_is_removed_with_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "INLINE_BYTES", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    manifest = Manifest.read(write(tmp_path / "m.parquet"))
    pickle.dumps(manifest)
    assert list(tmp_path.glob("frameloom-*.arrow"))
    del manifest
    assert not list(tmp_path.glob("frameloom-*.arrow"))


def test_wrong_table_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 0"):
        write_manifest(tmp_path / "m.parquet", pl.DataFrame(GOOD | {"height": [0, 1, 1]}))
    assert not list(tmp_path.iterdir())
