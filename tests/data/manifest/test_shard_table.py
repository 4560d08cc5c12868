from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import typer
from typer.testing import CliRunner

import frameloom.data.manifest.shard_table as shard_table
from frameloom.cli.data import shard
from frameloom.config.schema.data import SourceSection
from frameloom.core.errors import DataError
from frameloom.data.manifest.manifest import Manifest, shard_manifest
from frameloom.data.manifest.sources.reading import read_source

NUM_ROWS = 2500


def make_table(num_rows: int = NUM_ROWS) -> pl.DataFrame:
    index = pl.Series("index", range(num_rows))
    is_image = index % 5 == 0
    return pl.DataFrame(
        {
            "path": [f"v/{i}.{'png' if i % 5 == 0 else 'mp4'}" for i in range(num_rows)],
            "caption": [f"clip {i} ü" for i in range(num_rows)],
            "kind": ["image" if i % 5 == 0 else "video" for i in range(num_rows)],
            "height": 64 + index % 7 * 16,
            "width": 64 + index % 3 * 16,
            "frames": pl.Series([1 if still else 9 + i % 40 for i, still in enumerate(is_image)]),
            "fps": [None if still else 24.0 for still in is_image],
            "split": ["train" if i % 10 else "val" for i in range(num_rows)],
            "score": index / 7,
        }
    )


@pytest.fixture
def whole(tmp_path: Path) -> Manifest:
    make_table().write_parquet(tmp_path / "m.parquet")
    return Manifest.read(tmp_path / "m.parquet")


@pytest.fixture
def shards(tmp_path: Path, whole: Manifest) -> Path:
    list(shard_manifest(tmp_path / "m.parquet", tmp_path / "shards", rows=600))
    return tmp_path / "shards"


def assert_same(one: Manifest, other: Manifest) -> None:
    assert len(one) == len(other)
    for name in ("height", "width", "frames", "fps"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for row in {0, 1, 599 % len(one), 600 % len(one), len(one) - 1}:
        assert one.clip(row) == other.clip(row)
        assert one.caption(row) == other.caption(row)
        assert one.file(row) == other.file(row)
    assert one.columns == other.columns
    for name in ("caption", "split", "score", "kind"):
        assert one.column(name).to_list() == other.column(name).to_list()


def test_shards_hold_the_same_rows_and_fingerprint(shards: Path, whole: Manifest) -> None:
    sharded = Manifest.read(shards)
    assert sorted(path.name for path in shards.glob("*.parquet")) == [f"0000{i}.parquet" for i in range(1, 6)]
    assert_same(sharded, whole)
    assert sharded.fingerprint == whole.fingerprint
    assert_same(pickle.loads(pickle.dumps(sharded)), whole)


@pytest.mark.parametrize("where", ["split == 'val' and score > 20", {"split": "val"}, "frames >= 9"])
def test_filtered_shards_equal_the_filtered_table(shards: Path, whole: Manifest, where: object) -> None:
    sharded, table = Manifest.read(shards, where=where), Manifest.read(shards.parent / "m.parquet", where=where)
    assert 0 < len(sharded) < NUM_ROWS
    assert_same(sharded, table)
    # This one is worked out from the rows on disk, not read from the index.
    assert sharded.fingerprint == table.fingerprint != whole.fingerprint


def test_a_filter_that_keeps_nothing_or_names_no_column_is_refused(shards: Path) -> None:
    with pytest.raises(DataError, match="no row has score > 9999"):
        Manifest.read(shards, where="score > 9999")
    with pytest.raises(DataError, match=r"no column 'scor'; did you mean 'score'\?"):
        Manifest.read(shards, where="scor > 1")


def test_only_sizes_are_in_memory_and_few_row_groups(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_table, "_MAX_GROUPS", 2)
    monkeypatch.setattr(shard_table, "_MAX_FILES", 2)
    manifest = Manifest.read(shards)
    rows = manifest.parts[0].rows
    assert isinstance(rows, shard_table.ShardRows)
    assert rows._geometry.columns == ["kind", "height", "width", "frames", "fps"]
    wanted = np.random.default_rng(0).integers(0, NUM_ROWS, 60)
    assert manifest.captions(wanted) == [f"clip {i} ü" for i in wanted]
    assert len(rows._groups) == 2 and len(rows._files) == 2
    assert rows._geometry._table.estimated_size() < 30 * NUM_ROWS


def test_a_changed_shard_is_refused(shards: Path) -> None:
    table = pl.read_parquet(shards / "00002.parquet")
    table.with_columns(caption=pl.lit("changed")).write_parquet(shards / "00002.parquet")
    with pytest.raises(DataError, match=r"00002\.parquet: missing, or not the \d+ bytes"):
        Manifest.read(shards)
    (shards / "00002.parquet").unlink()
    with pytest.raises(DataError, match=r"00002\.parquet: missing"):
        Manifest.read(shards)


def test_a_flipped_byte_is_noticed_when_the_shard_is_first_read(shards: Path) -> None:
    manifest = Manifest.read(shards)
    data = bytearray((shards / "00003.parquet").read_bytes())
    data[len(data) // 3] ^= 1
    (shards / "00003.parquet").write_bytes(bytes(data))
    assert manifest.caption(0) == "clip 0 ü"
    with pytest.raises(DataError, match=r"00003\.parquet: its content is not what shards\.json says"):
        manifest.caption(1300)


@pytest.mark.parametrize("text", ["{", '{"format": "other"}', '{"format": "frameloom table shards 1"}', "[]"])
def test_a_damaged_index_is_refused(shards: Path, text: str) -> None:
    (shards / "shards.json").write_text(text)
    with pytest.raises(DataError, match=r"shards\.json"):
        Manifest.read(shards)


def test_an_index_cannot_name_files_elsewhere(shards: Path) -> None:
    index = json.loads((shards / "shards.json").read_text())
    index["shards"][0]["file"] = "../m.parquet"
    index["shards"][0]["bytes"] = (shards.parent / "m.parquet").stat().st_size
    (shards / "shards.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="cut the table again"):
        Manifest.read(shards)


def test_sharding_into_a_used_folder_or_from_a_wrong_table_writes_nothing(tmp_path: Path, whole: Manifest) -> None:
    (tmp_path / "used").mkdir()
    with pytest.raises(DataError, match="exists already"):
        list(shard_manifest(tmp_path / "m.parquet", tmp_path / "used", rows=10))
    make_table().drop("height").write_parquet(tmp_path / "w.parquet")
    with pytest.raises(DataError, match="frameloom data scan"):
        list(shard_manifest(tmp_path / "w.parquet", tmp_path / "out", rows=10))
    assert {path.name for path in tmp_path.iterdir()} == {"m.parquet", "w.parquet", "used"}


def test_the_root_is_told_where_it_is_not_the_folder_above(tmp_path: Path, whole: Manifest) -> None:
    assert len(list(shard_manifest(tmp_path / "m.parquet", tmp_path / "near", rows=1000))) == 1
    told = list(shard_manifest(tmp_path / "m.parquet", tmp_path / "far/away", rows=1000))
    assert f"paths start from {tmp_path}" in told[1]


def test_shards_mix_with_other_sources(shards: Path, whole: Manifest) -> None:
    other = str(shards.parent / "m.parquet")
    first = SourceSection(path=other, where="score < 1")
    both = Manifest.read_sources([first, SourceSection(path=str(shards), where={"split": "val"})])
    assert both.captions([6, 7, 8]) == ["clip 6 ü", "clip 0 ü", "clip 10 ü"]
    again = [first, SourceSection(path=other, where={"split": "val"})]
    assert both.fingerprint == Manifest.read_sources(again).fingerprint


# tables that others have cut


def as_open_sora(table: pl.DataFrame) -> pl.DataFrame:
    return (
        table.rename({"caption": "text", "frames": "num_frames"})
        .drop("kind")
        .with_columns(pl.col("fps").fill_null(float("nan")))
    )


def test_shards_without_an_index_are_checked_and_equal_the_table(tmp_path: Path, whole: Manifest) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    for number in range(11):  # more than nine: the order is that of the numbers
        as_open_sora(make_table()).slice(number * 240, 240).write_parquet(folder / f"part-{number}.parquet")
    sharded = Manifest.read(folder, root=tmp_path)
    assert sharded.column("caption").to_list() == whole.column("caption").to_list()
    assert sharded.clip(2000) == whole.clip(2000)
    assert sharded.fingerprint == whole.fingerprint
    assert read_source(folder, root=tmp_path).table["caption"].to_list() == whole.column("caption").to_list()
    broken = pl.read_parquet(folder / "part-10.parquet").with_columns(height=0)
    broken.write_parquet(folder / "part-10.parquet")
    with pytest.raises(DataError, match=r"part-10\.parquet: row 0, column 'height': 0 must be from 1"):
        Manifest.read(folder, root=tmp_path)


def make_open_sora(tmp_path: Path, rows: int) -> Path:
    table = as_open_sora(make_table())
    sizes = ["num_frames", "height", "width", "fps"]
    table.select("path", *sizes).write_parquet(tmp_path / "data.v1.parquet")
    folder = tmp_path / "data.v1"
    folder.mkdir()
    for number, start in enumerate(range(0, table.height, rows), 1):
        table.drop(sizes).slice(start, rows).write_parquet(folder / f"{number:05d}.parquet")
    return folder


@pytest.mark.parametrize("rows", [1000, 300])
@pytest.mark.parametrize("given", ["data.v1", "data.v1.parquet"])
def test_open_soras_own_shards_are_joined_with_their_sizes(
    tmp_path: Path, whole: Manifest, given: str, rows: int
) -> None:
    make_open_sora(tmp_path, rows)
    sharded = Manifest.read(tmp_path / given)
    assert sharded.clip(1234) == whole.clip(1234)
    assert sharded.file(7) == whole.file(7)
    assert sharded.column("split").to_list() == whole.column("split").to_list()
    assert sharded.fingerprint == whole.fingerprint
    val = Manifest.read(tmp_path / given, where="split == 'val' and frames > 1 or score > 300")
    assert val.clip(3) == Manifest.read(
        tmp_path / "m.parquet", where="split == 'val' and frames > 1 or score > 300"
    ).clip(3)


def test_open_soras_shards_that_do_not_fit_their_table_are_refused(tmp_path: Path, whole: Manifest) -> None:
    folder = make_open_sora(tmp_path, 1000)
    last = pl.read_parquet(folder / "00003.parquet")
    last.reverse().write_parquet(folder / "00003.parquet")
    with pytest.raises(DataError, match=r"00003\.parquet: its paths are not those of rows 2000 to 2499"):
        Manifest.read(folder)
    last.head(3).write_parquet(folder / "00003.parquet")
    with pytest.raises(DataError, match=r"2003 rows together, but .* has 2500"):
        Manifest.read(folder)


def test_the_command_cuts_a_table(tmp_path: Path, whole: Manifest) -> None:
    app = typer.Typer()
    app.command()(shard)
    words = [str(tmp_path / "m.parquet"), str(tmp_path / "out"), "--rows", "1000", "--where", "split == 'train'"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and done.stdout == f"{tmp_path}/out: 2,250 rows in 3 shards\n"
    assert len(Manifest.read(tmp_path / "out")) == 2250
