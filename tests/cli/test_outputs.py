"""Places that cannot be written are told before any work, and nothing that is read is written over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from frameloom.data.media.writing import write_video
from tests.faults.warm import run_frameloom

SCAN, CHECK = ("data", "scan", "clips"), ("data", "check", "m.parquet")
VERIFY, REPORT = ("data", "verify", "m.parquet"), ("data", "report", "m.parquet")
CACHE = ("data", "cache", "shapes/demo", "--data.manifest", "m.parquet", "--vae.weights", "clips")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two clips, a list of them, and a file and a folder that are in the way."""
    (tmp_path / "clips").mkdir()
    (tmp_path / "o.parquet").mkdir()
    (tmp_path / "file").write_text("mine")
    for number in range(2):
        pixels = np.full((5, 64, 64, 3), 100 * number, dtype=np.uint8)
        write_video(tmp_path / "clips" / f"{number}.mp4", pixels, 24, preset="ultrafast")
    facts = {"kind": "video", "height": 64, "width": 64, "frames": 5, "fps": 24.0}
    rows = [{"path": f"clips/{number}.mp4", "caption": "a clip", **facts} for number in range(2)]
    pl.DataFrame(rows).write_parquet(tmp_path / "m.parquet")
    pl.DataFrame(rows).write_csv(tmp_path / "src.csv")
    return tmp_path


def list_files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*SCAN, "--out", "o.parquet"), "--out o.parquet: a folder"),
        ((*CHECK, "--out", "o.parquet"), "--out o.parquet: a folder"),
        ((*VERIFY, "--out", "o.parquet"), "--out o.parquet: a folder"),
        ((*REPORT, "--out", "o.parquet"), "--out o.parquet: a folder"),
        ((*SCAN, "--out", "file/x.parquet"), "file is no folder"),
        ((*CHECK, "--out", "file/a/x.parquet"), "file is no folder"),
        ((*VERIFY, "--out", "file/x.parquet"), "file is no folder"),
        ((*REPORT, "--out", "file/x.html"), "file is no folder"),
        ((*REPORT, "--out", "m.parquet"), "--out m.parquet: would replace what is read"),
        (("data", "scan", "src.csv", "--out", "src.csv"), "--out src.csv: would replace what is read"),
        ((*SCAN, "--out", "x.csv"), "--out x.csv: must end in .parquet; write x.parquet"),
        (("data", "ledger", "runs/none", "--out", "o.parquet"), "--out o.parquet: a folder"),
        (("data", "shapes", "file", "--count", "2"), "OUT file: "),
        (("data", "shard", "m.parquet", "file/shards"), "OUT file/shards: "),
        ((*CACHE, "--data.cache.latents", "file"), "data.cache.latents file: "),
    ],
)
def test_a_place_that_cannot_be_written_is_told_before_any_work(
    folder: Path, words: tuple[str, ...], message: str
) -> None:
    before = list_files(folder)
    done = run_frameloom(*words, cwd=folder)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list_files(folder) == before


def test_a_manifest_may_be_scanned_and_checked_in_place(folder: Path) -> None:
    for command in ("scan", "check"):
        done = run_frameloom("data", command, "m.parquet", "--out", "m.parquet", "--workers", "1", cwd=folder)
        assert done.returncode == 0, done.stderr
    assert pl.read_parquet(folder / "m.parquet").height == 2


def test_captions_that_are_no_lists_are_told_before_any_work(folder: Path) -> None:
    pl.read_csv(folder / "src.csv").with_columns(captions=pl.lit("one;two")).write_csv(folder / "src.csv")
    done = run_frameloom("data", "scan", "src.csv", "--out", "new.parquet", cwd=folder)
    assert done.returncode == 2 and "src.csv: column 'captions' has type String" in done.stderr
    assert not (folder / "new.scan").exists()
