"""Each bad or odd file of a corpus gets its written verdict from a scan, an audit and decoding; runs go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from frameloom.core.errors import DataError
from frameloom.core.paths import safe_join
from frameloom.data.curation.inspection import FileWork, Job
from frameloom.data.curation.scan import ScanOptions, errors_path, finish_scan, scan_files
from frameloom.data.loading import reader
from frameloom.data.media.decode import IMAGE_FORMATS, ClipError, read_clip, read_image
from frameloom.training.train import train
from tests.conftest import World
from tests.data.bad_files import FRAMES, build_bad_files
from tests.faults.conftest import Tally

TABLE: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "bad_files.json").read_text(encoding="utf-8")
)
NAMES = [row["file"] for row in TABLE]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus") / "root"
    assert list(build_bad_files(root)) == NAMES, "the builder and the table name different files"
    return root


EVERY = [pytest.param(row, id=ascii(row["file"])[1:40]) for row in TABLE]


def test_19_corpus_is_large_enough_and_has_good_files_among_the_bad() -> None:
    bad = [row for row in TABLE if "reason" in row["scan"]]
    assert len(bad) >= 25
    assert len(TABLE) - len(bad) >= 25


@pytest.mark.parametrize("row", EVERY)
def test_19_scan_says_what_the_table_says(root: Path, row: dict[str, Any]) -> None:
    found = FileWork(root)(Job(row["file"]))
    expected = row["scan"]
    assert found.get("reason") == expected.get("reason"), found.get("error")
    if "reason" in expected:
        assert expected["text"] in found["error"]
        return
    facts = {name: found[name] for name in expected}
    assert facts == expected | {"fps": pytest.approx(expected["fps"], abs=0.01) if expected["fps"] else None}
    audit = FileWork(root)(Job(row["file"], is_audited=True))
    assert row["audit"] in audit.get("error", "ok")


@pytest.mark.parametrize("row", EVERY)
def test_19_decoder_does_what_the_table_says(root: Path, tally: Tally, row: dict[str, Any]) -> None:
    tally.inject()
    assert row["decode"] in decode(root, row)


def decode(root: Path, row: dict[str, Any]) -> str:
    """Read the first and the last frame as a training run would."""
    last = row["scan"].get("frames", FRAMES) - 1
    try:
        path = safe_join(root, row["file"])
        if path.suffix.lower() in IMAGE_FORMATS:
            read_image(path, height=32, width=32)
        else:
            read_clip(path, indices=sorted({0, last}), height=32, width=32)
    except DataError as error:
        return str(error)
    return "ok"


def test_19_frames_that_scan_promises_are_all_there_is(root: Path) -> None:
    for row in TABLE:
        if row["scan"].get("kind") == "video" and row["decode"] == "ok":
            with pytest.raises(DataError, match="is not there"):
                read_clip(root / row["file"], indices=[row["scan"]["frames"]], height=16, width=16)


@pytest.mark.slow
def test_19_whole_corpus_becomes_a_manifest_and_a_list_of_errors(root: Path, tmp_path: Path) -> None:
    table = pl.DataFrame({"path": NAMES, "caption": ["a clip"] * len(NAMES)})
    out = tmp_path / "manifest.parquet"
    scan_files(table, root, out, ScanOptions(workers=2, timeout_s=60, audit=1.0))
    result = finish_scan(table, root, out)
    good = [row["file"] for row in TABLE if row.get("audit") == "ok"]
    assert result.good["path"].to_list() == good
    errors = pl.read_parquet(errors_path(out))
    assert errors["path"].to_list() == [name for name in NAMES if name not in good]
    assert [NAMES[row] for row in errors["row"]] == errors["path"].to_list()
    assert errors["error"].null_count() == 0
    by_stage = dict(errors.group_by("stage").len().iter_rows())
    assert by_stage == {"header": sum("reason" in row["scan"] for row in TABLE), "decode": 5}


BAD = ("empty.mp4", "index_lost.mp4", "text.mp4", "random.mp4", "audio_only.mp4")


def spoil(world: World, root: Path, count: int) -> tuple[Path, list[str]]:
    """A copy of the shared set in which some train clips are broken, each in another way."""
    data = world.folder / "data"
    shutil.copytree(world.shared / "data", data)
    table = pl.read_parquet(data / "manifest.parquet").filter(split="train", kind="video")
    paths = table["path"].to_list()[:count]
    for path, bad in zip(paths, BAD, strict=False):
        shutil.copy(root / bad, data / path)
    return data / "manifest.parquet", paths


def test_19_a_run_with_broken_clips_ends_with_their_exact_count(root: Path, world: World, tally: Tally) -> None:
    manifest, paths = spoil(world, root, 3)
    words = ("--data.manifest", str(manifest), "--data.bad_limit", "0.2", "--data.workers", "2")
    tally.inject(len(paths))
    run = train(world.recipe(*words, "--train.steps", "10"))  # an epoch has 9
    listed = [json.loads(line) for line in (run / "bad_clips.jsonl").read_text().splitlines()]
    assert {entry["path"] for entry in listed} == set(paths)
    assert not any(entry["fatal"] for entry in listed), "a worker died"


def test_19_without_replacement_one_broken_clip_would_end_the_run(
    root: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: errors of single clips pass as they come."""
    manifest, _ = spoil(world, root, 1)

    class Never(Exception):
        pass

    monkeypatch.setattr(reader, "ClipError", Never)
    with pytest.raises(ClipError):
        train(world.recipe("--data.manifest", str(manifest), "--data.bad_limit", "0.2", "--train.steps", "10"))
