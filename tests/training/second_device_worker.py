"""Trains twins of recipes on the host and on a second device; see `test_second_device`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from frameloom.config.schema.recipe import Recipe
from frameloom.training.run.folder import RunFolder
from frameloom.training.train import build_trainer
from tests.recipes.twins import Workshop
from tests.training.second_device import SecondDevice

SAMPLES = {"prompts": ["a red circle"], "steps": 2, "guidance": 2.0}
SMALL = {"height": 64, "width": 64}
FULL = {"precision": "fp32", "weights_precision": "fp32"}


def load(workshop: Workshop, name: str, folder: Path, device: str) -> Recipe:
    sections: dict[str, Any] = {"train": FULL, "validation": {"batches": 1, "levels": 2, "where": "split == 'heldout'"}}
    if not name.startswith("opensora_plan/wfvae"):
        sections["validation"]["samples"] = SAMPLES
        sections["sample"] = {**SMALL, "frames": 1 if name.startswith("sdxl") else 9}
    twin = workshop.load_twin(name, run_folder=folder, **sections)
    return twin.model_copy(update={"train": twin.train.model_copy(update={"device": device})})


def train(twin: Recipe) -> dict[str, Any]:
    folder = RunFolder(Path(twin.run.folder) / twin.name)
    folder.path.mkdir()
    trainer = build_trainer(twin, folder, first_step=1)
    trainer.run()
    for tracker in trainer.trackers:
        tracker.close()
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return {
        "devices": sorted({weight.device.type for weight in trainer.task.model.parameters()}),
        "losses": [line[key] for line in lines for key in sorted(line) if key == "train/loss" or "validation/" in key],
        "samples": sorted(path.name for path in folder.path.glob("samples/*/*.*")),
    }


def main(manifest: str, folder: str, *names: str) -> None:
    workshop = Workshop(Path(manifest), Path(folder))
    found = {}
    for number, name in enumerate(names):
        for device in ("cpu", "second"):
            place = Path(folder) / f"{number}-{device}"
            place.mkdir()
            with SecondDevice():
                found[f"{name} {device}"] = train(load(workshop, name, place, device))
    (Path(folder) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
