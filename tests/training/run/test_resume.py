"""Other splits of a batch, and folders that are used already; resumes to the bit are rows 12 to 18 of tests/faults."""

from __future__ import annotations

from pathlib import Path

import polars
import pytest

from frameloom.core.errors import RunError
from frameloom.training.run.resuming import ResumeChoices
from frameloom.training.train import train
from tests.faults.runs import metrics


def even_manifest(world) -> str:
    """A table whose clips fill whole batches of 4: an accumulation split then changes nothing but sums."""
    table = polars.read_parquet(world.shared / "data" / "manifest.parquet")
    wide = table.filter(kind="video", split="train").filter(polars.col("width") >= polars.col("height")).head(16)
    assert len(wide) == 16
    path = world.folder / "even.parquet"
    wide.write_parquet(path)
    return str(path)


def split_recipe(world, name: str, batch: int, accumulate: int, *overrides: str):
    return world.recipe(
        *("--name", name, "--data.manifest", even_manifest(world), "--data.root", str(world.shared / "data")),
        *("--data.buckets", f"{{64px: {{9: [1.0, {batch}]}}}}", "--train.accumulate", str(accumulate), *overrides),
    )


def losses(run: Path) -> list[float]:
    return [record["train/loss"] for record in metrics(run)]


def test_another_accumulation_split_uses_the_same_samples_and_noise(world):
    whole = train(split_recipe(world, "whole", 4, 1))
    halves = train(split_recipe(world, "halves", 2, 2))
    assert losses(halves) == pytest.approx(losses(whole), rel=1e-5)
    other = train(split_recipe(world, "other", 2, 2, "--seed", "7"))
    assert losses(other) != pytest.approx(losses(whole), rel=1e-5)


def test_a_resume_may_change_the_split_in_the_middle_of_an_epoch(world):
    """Two steps of 4, then steps of 2 + 2: the same samples follow."""
    whole = train(split_recipe(world, "whole", 4, 1))
    train(split_recipe(world, "changed", 4, 1, "--train.steps", "2"))
    changed = train(split_recipe(world, "changed", 2, 2), ResumeChoices(accept_recipe_change=True))
    assert losses(changed) == pytest.approx(losses(whole), rel=1e-5)


def test_resume_never_refuses_a_used_folder(world):
    train(world.recipe())
    with pytest.raises(RunError, match="holds a run already"):
        train(world.recipe("--run.resume", "never"))
