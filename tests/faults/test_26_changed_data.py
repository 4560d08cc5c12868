"""Data that changed between a save and a resume is refused with what changed; a flag accepts it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from frameloom.core.errors import CheckpointError
from frameloom.training.run import resuming
from frameloom.training.train import train
from tests.faults.runs import losses

Change = Callable[[pl.DataFrame], pl.DataFrame]
CHANGES: dict[str, Change] = {
    "a clip removed": lambda table: table.slice(1),
    "rows in another order": lambda table: table.reverse(),
    "a caption edited": lambda table: table.with_columns(caption=pl.col("caption") + " today"),
    "a file edited": lambda table: table.with_columns(sha256=pl.lit("0" * 64)),
}


@pytest.fixture
def manifest(world) -> Path:
    path = shutil.copytree(world.shared / "data", world.folder / "data") / "manifest.parquet"
    train(world.recipe("--data.manifest", str(path), "--train.steps", "2"))
    return path


@pytest.mark.parametrize("what", CHANGES)
def test_it_is_refused(world, manifest, tally, what):
    CHANGES[what](pl.read_parquet(manifest)).write_parquet(manifest)
    tally.inject()
    with pytest.raises(CheckpointError, match="manifest has changed"):
        train(world.recipe("--data.manifest", str(manifest)))
    assert max(losses(world.folder / "run")) == 2


def test_a_flag_accepts_it(world, manifest, warm, tally):
    """The command says what changed, and goes on only when it is told to."""
    CHANGES["a clip removed"](pl.read_parquet(manifest)).write_parquet(manifest)
    words = ("train", str(world.folder / "recipe.yaml"), "--data.manifest", str(manifest))
    tally.inject()
    refused = warm.command(*words)
    assert warm.wait(refused) == 2 and "--accept-data-change" in refused.output, refused.output
    accepted = warm.command(*words, "--accept-data-change")
    assert warm.wait(accepted) == 0, accepted.output
    assert sorted(losses(world.folder / "run")) == [1, 2, 3, 4, 5, 6]


def test_without_the_fingerprint_other_clips_would_follow_in_silence(world, manifest, monkeypatch):
    """The control."""
    monkeypatch.setattr(resuming, "check_data", lambda *given: None)
    CHANGES["rows in another order"](pl.read_parquet(manifest)).write_parquet(manifest)
    run = train(world.recipe("--data.manifest", str(manifest)))
    assert max(losses(run)) == 6
