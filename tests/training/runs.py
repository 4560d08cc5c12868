"""What tests of training ask of a run: its losses, and a trainer that is built but not started."""

from __future__ import annotations

import json
from pathlib import Path

from frameloom.config.schema.recipe import Recipe
from frameloom.training.loop import Trainer
from frameloom.training.run.folder import RunFolder
from frameloom.training.train import build_trainer


def losses(run: Path) -> list[float]:
    """Those of the training steps, as logged."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


def open_trainer(recipe: Recipe, path: Path) -> Trainer:
    """A trainer at its first step in the folder `path`, with nothing open that must be closed."""
    path.mkdir(exist_ok=True)
    trainer = build_trainer(recipe, RunFolder(path), first_step=1)
    for tracker in trainer.trackers:
        tracker.close()
    return trainer
