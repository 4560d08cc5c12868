"""More bad clips than the recipe allows stop the run with their list; fewer are replaced, the same way on every run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from frameloom.core.errors import DataError
from frameloom.data.loading.bad_clips import BadClipLog
from frameloom.training.train import train
from tests.faults.runs import digests, metrics


@pytest.fixture
def spoilt(world) -> tuple[list[str], list[str]]:
    """Words for a set with two broken clips of about thirty, and the paths of the two."""
    data = shutil.copytree(world.shared / "data", world.folder / "data")
    paths = pl.read_parquet(data / "manifest.parquet").filter(split="train", kind="video")["path"].to_list()[:2]
    for path in paths:
        (data / path).write_bytes(b"not a video")
    return ["--data.manifest", str(data / "manifest.parquet"), "--train.steps", "10"], paths


def listed(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "bad_clips.jsonl").read_text().splitlines()]


def test_the_run_stops_with_the_list(world, spoilt, tally):
    words, paths = spoilt
    tally.inject()
    with pytest.raises(DataError, match=r"clips cannot be read, over the limit of 1%") as caught:
        train(world.recipe(*words, "--name", "strict"))
    assert "bad_clips.jsonl" in str(caught.value) and any(path in str(caught.value) for path in paths)


def test_replacement_is_the_same_on_every_run_and_after_a_resume(world, spoilt, tally):
    words, paths = [*spoilt[0], "--data.bad_limit", "0.2"], spoilt[1]
    tally.inject(2)
    first = train(world.recipe(*words, "--name", "first"))
    train(world.recipe(*words, "--name", "second", "--train.steps", "4"))
    second = train(world.recipe(*words, "--name", "second", "--data.workers", "2"))
    assert {entry["path"] for entry in listed(first)} == set(paths)
    assert sorted(map(str, listed(first))) == sorted(map(str, listed(second)))
    assert digests(first, 10) == digests(second, 10) and metrics(first) == metrics(second)
    whole = train(world.recipe("--train.steps", "10", "--name", "whole"))
    assert digests(first, 10) != digests(whole, 10)


def test_without_the_limit_the_run_would_go_on(world, spoilt, monkeypatch):
    """The control."""
    monkeypatch.setattr(BadClipLog, "check", lambda self: None)
    assert len(listed(train(world.recipe(*spoilt[0])))) >= 2
