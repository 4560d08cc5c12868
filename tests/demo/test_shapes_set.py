"""Writing Moving Shapes: the same bytes, whole sets, and going on after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

import frameloom
from frameloom.core.errors import DataError
from frameloom.core.files import PARTIAL, digest_file
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.writing import read_metadata
from frameloom.demo.shapes import held_out_combinations, parse_caption
from frameloom.demo.shapes_set import format_shapes, plan_clips, write_shapes

ROOT = Path(frameloom.__file__).parent.parent


def read_tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): digest_file(path) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def shapes_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes") / "set", count=80, seed=5, num_workers=1).parent


def test_manifest_tells_the_truth_about_every_file(shapes_set: Path) -> None:
    manifest = Manifest.read(shapes_set / "manifest.parquet")
    table = pl.read_parquet(shapes_set / "manifest.parquet")
    assert len(manifest) == 80
    for row in table.iter_rows(named=True):
        path = shapes_set / row["path"]
        assert (path.stat().st_size, digest_file(path)) == (row["bytes"], row["sha256"])
        assert path.suffix == {"video": ".mp4", "image": ".png"}[row["kind"]]
        found = parse_caption(row["caption"])
        assert found is not None
        names = ("colour", "shape", "background", "motion", "speed")
        assert all(getattr(found, name) == row[name] for name in names)
        assert read_metadata(path)["caption"] == row["caption"]
    files = [name for name in read_tree(shapes_set) if name.startswith("clips/")]
    assert sorted(files) == sorted(table["path"])


def test_shares_are_exact_and_sizes_vary() -> None:
    clips = plan_clips(500, 0, image_share=0.2, heldout_share=0.1)
    assert sum(clip.fps is None for clip in clips) == 100
    assert sum(clip.split == "heldout" for clip in clips) == 50
    assert len({(clip.height_px, clip.width_px) for clip in clips}) == 9
    assert {clip.num_frames for clip in clips} == {1, 9, 13, 17, 25}
    assert {clip.fps for clip in clips} == {None, 8, 12, 16}


def test_held_out_combinations_are_never_in_train() -> None:
    held = set(held_out_combinations())
    clips = plan_clips(3000, 1, image_share=0.2, heldout_share=0.1)
    shown = {
        split: {clip.attributes.combination for clip in clips if clip.split == split} for split in ("train", "heldout")
    }
    assert not shown["train"] & held
    assert shown["heldout"] == held  # the rows of the other split do show them


def test_bytes_do_not_depend_on_processes_but_on_the_seed(shapes_set: Path, tmp_path: Path) -> None:
    write_shapes(tmp_path / "two", count=80, seed=5, num_workers=2)
    assert read_tree(tmp_path / "two") == read_tree(shapes_set)
    write_shapes(tmp_path / "other", count=80, seed=6, num_workers=1)
    other = read_tree(tmp_path / "other")
    assert not set(other.values()) & set(read_tree(shapes_set).values())


def test_finished_set_is_left_as_it_is(shapes_set: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in shapes_set.rglob("*")}
    assert write_shapes(shapes_set, count=80, seed=5) == shapes_set / "manifest.parquet"
    assert {path: path.stat().st_mtime_ns for path in shapes_set.rglob("*")} == before


def test_killed_writer_is_continued_to_the_same_bytes(shapes_set: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    code = f"""
if __name__ == "__main__":
    from pathlib import Path
    from frameloom.demo.shapes_set import write_shapes
    write_shapes(Path({str(out)!r}), count=80, seed=5, num_workers=2)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    process = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 60
    while len(list(out.glob("clips/00/0*"))) < 10 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "manifest.parquet").exists()
    time.sleep(0.5)  # its own processes notice and end
    finished = {path: path.stat().st_mtime_ns for path in out.glob("clips/00/0*")}
    assert 10 <= len(finished) < 80
    (out / "clips" / "00" / f"{PARTIAL}12345678-000079.mp4").write_bytes(b"half")
    write_shapes(out, count=80, seed=5, num_workers=1)
    assert read_tree(out) == read_tree(shapes_set)
    assert all(path.stat().st_mtime_ns == written for path, written in finished.items())


def test_folder_of_another_set_is_refused(shapes_set: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="seed 5 instead of 6"):
        write_shapes(shapes_set, count=80, seed=6)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"notes\.txt"):
        write_shapes(tmp_path, count=80, seed=5)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_damaged_settings_are_refused(tmp_path: Path) -> None:
    for content in ("{", "[1]"):
        (tmp_path / "shapes.json").write_text(content)
        with pytest.raises(DataError, match="choose a new folder"):
            write_shapes(tmp_path, count=4, seed=0)


@pytest.mark.parametrize("wrong", [{"count": 0}, {"image_share": 1.5}, {"heldout_share": -0.1}])
def test_wrong_numbers_are_refused(tmp_path: Path, wrong: dict[str, float]) -> None:
    with pytest.raises(DataError, match="Moving Shapes"):
        write_shapes(tmp_path / "set", **{"count": 4, "seed": 0, **wrong})  # type: ignore[arg-type]
    assert not (tmp_path / "set").exists()


def test_description_counts_what_is_there(shapes_set: Path) -> None:
    text = "\n".join(format_shapes(shapes_set / "manifest.parquet"))
    assert "64 videos and 16 images" in text
    assert "72 train, 8 heldout" in text
