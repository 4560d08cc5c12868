"""Every denoiser family learns eight clips by heart, at its tiny size, through the real trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars
import pytest

from frameloom.training.train import train
from tests.conftest import World

NUM_CLIPS = 8
STEPS = {"sdxl": 80, "latte": 60, "opensora_plan": 60, "cogvideox_fun": 60, "opensora2": 60}
# Clips that were not learned have at least this many times the loss of those that were.
MORE = 1.3
V = {"objective": {"kind": "v"}}
FAMILIES: dict[str, dict[str, Any]] = {
    "sdxl": {"objective": {"kind": "epsilon"}, "sample": {"frames": 1}},
    "latte": V,
    "opensora_plan": V,
    "cogvideox_fun": V,
    "opensora2": {},
}


@pytest.fixture(scope="module")
def eight(shared_world: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Eight clips to learn and eight others, and an autoencoder that knows the scale of its latents."""
    world = World(shared_world, tmp_path_factory.mktemp("overfit"))
    table = polars.read_parquet(shared_world / "data" / "manifest.parquet").filter(kind="video").head(2 * NUM_CLIPS)
    splits = polars.Series("split", ["learned"] * NUM_CLIPS + ["others"] * NUM_CLIPS)
    table.with_columns(splits).write_parquet(world.folder / "eight.parquet")
    train(world.recipe("--name", "vae", "--train.steps", "2", task="autoencoder"))
    return world


def overfit(world: World, family: str, *overrides: str, steps: int) -> Path:
    frames = 1 if family == "sdxl" else 9
    data = {
        "_delete_": True,
        "manifest": str(world.folder / "eight.parquet"),
        "root": str(world.shared / "data"),
        "where": {"split": "learned"},
        "policy": "fixed",
        "fixed": {"height": 64, "width": 64, "frames": frames, "batch": NUM_CLIPS},
        "workers": 0,
        "frame_start": "first",
        # One latent for each clip, not a new draw each time: there would be nothing to learn by heart.
        "cache": {
            "latents": str(world.folder / f"latents-{frames}"),
            "text": str(world.folder / "text"),
            "on_demand": True,
            "store": "sample",
        },
    }
    sections = {
        "model": {"_delete_": True, "family": family},
        "vae": {"weights": str(world.folder / "vae")},
        "text": {"dropout": 0},
        "data": data,
        "optim": {"lr": 1e-3},
        "train": {"steps": steps, "log_every": 1, "ema": None},
        "validation": {"where": {"split": "others"}, "every": steps, "batches": 1},
        **FAMILIES[family],
    }
    return train(world.recipe("--name", f"{family}-{steps}", *overrides, **sections))


def read(run: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiny_size_learns_eight_clips_by_heart(eight: World, family: str) -> None:
    run = overfit(eight, family, steps=STEPS[family])
    losses = read(run, "train/loss")
    assert len(losses) == STEPS[family]
    assert mean(losses[-10:]) < 0.3 * mean(losses[:5])
    (others,) = read(run, "validation/validation_loss")
    assert others > MORE * mean(losses[-10:])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["opensora2", "sdxl", "latte"])
def test_without_a_learning_rate_nothing_is_learned(eight: World, family: str) -> None:
    run = overfit(eight, family, "--optim.lr", "1e-9", steps=15)
    losses = read(run, "train/loss")
    assert mean(losses[-10:]) > 0.7 * mean(losses[:5])
    (others,) = read(run, "validation/validation_loss")
    assert others < MORE * mean(losses[-10:])
