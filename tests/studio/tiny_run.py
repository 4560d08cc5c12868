"""A folder as a person has it: a tiny run that was really trained, with samples, and recipes to start others from."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

from frameloom.config.loading.recipe import load_recipe
from frameloom.training.train import train
from tests.conftest import World

PROMPT = "a red circle moves left over a gray background"
RUN = "runs/tiny"


@cache
def make_root(shared: Path) -> Path:
    """Made once for all tests that only read it or add files of their own."""
    root = shared / "studio"
    root.mkdir()
    world = World(shared, root)
    sections = {
        "name": "tiny",
        "run": {"folder": str(root / "runs")},
        "validation": {
            "where": {"split": "heldout"},
            "every": 2,
            "batches": 1,
            "samples": {"prompts": [PROMPT], "every": 2, "steps": 2},
        },
        "train": {"steps": 4, "log_every": 1, "save_every": 2},
        "sample": {"steps": 3, "guidance": 2.0},
    }
    train(load_recipe(world.write_recipe(**sections)))
    (root / "recipe.yaml").unlink()
    long = {"_base_": "base.yaml", "name": "long", "run": {"folder": "runs"}, "train": {"steps": 100_000}}
    (root / "long.yaml").write_text(yaml.safe_dump(long))
    bad = {"_base_": "base.yaml", "name": "bad", "optim": {"learning_rate": 1}}
    (root / "bad.yaml").write_text(yaml.safe_dump(bad))
    return root
