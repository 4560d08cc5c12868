"""Runs of whole epochs: as many steps as their plans have, and what is done at the ends of epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frameloom.builders.data import build_plan, build_policy, read_manifest
from frameloom.checkpoint.reader import load_latest
from frameloom.core.errors import ConfigError
from frameloom.training.feed import count_steps, settle_length
from frameloom.training.train import train

CASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "accumulated": ("--train.accumulate", "3"),
    "dropped": ("--data.drop_last", "true", "--train.accumulate", "2"),
    "drawn": ("--data.buckets", "{64px: {1: [0.5, 3], 9: [0.5, 2]}}"),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_steps_of_an_epoch_are_those_of_its_plan(world: Any, case: str, num_ranks: int) -> None:
    recipe = world.recipe(*CASES[case])
    manifest, policy = read_manifest(recipe), build_policy(recipe)
    plan, per_step = build_plan(recipe, manifest, policy), recipe.train.accumulate * num_ranks
    counts = [count_steps(recipe, manifest, policy, epoch, num_ranks) for epoch in range(4)]
    assert counts == [-(-plan(epoch).num_microbatches // per_step) for epoch in range(4)]
    assert len(set(counts)) == 1 or case == "drawn"


def test_repeated_sources_make_longer_epochs(world: Any) -> None:
    path = str(world.shared / "data" / "manifest.parquet")
    words = ("--data.manifest", "null", "--data.sources")

    def count(repeat: float) -> int:
        recipe = world.recipe(*words, f"[{{path: {path}, repeat: {repeat}}}]")
        return count_steps(recipe, read_manifest(recipe), build_policy(recipe), 0)

    assert count(3) > 2 * count(1)


def test_a_run_of_epochs_ends_with_them_and_saves_at_their_ends(world: Any) -> None:
    data = {"buckets": {"_delete_": True, "64px": {"1": [1.0, 4]}}}
    lengths = {"_delete_": True, "epochs": 2, "save_every": "1 epoch", "keep": 9, "log_every": 1}
    recipe = world.recipe(train=lengths, data=data)
    settled = settle_length(recipe, read_manifest(recipe), build_policy(recipe))
    per_epoch, rest = divmod(settled.train.num_steps, 2)
    assert rest == 0 and per_epoch > 1
    run = train(recipe)
    found = load_latest(run / "checkpoints")
    assert found is not None and found.step == 2 * per_epoch
    assert (found.state["epoch"], found.state["position"]) == (2, 0)
    saved = sorted(int(path.name.split("-")[1]) for path in (run / "checkpoints").glob("step-*"))
    assert saved == [0, per_epoch, 2 * per_epoch]
    assert "epochs: 2" in (run / "recipe.yaml").read_text()
    longer = train(world.recipe("--train.epochs", "3", train=lengths, data=data))
    assert len(metrics(longer)) == 3 * per_epoch


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_what_is_too_long_for_the_epochs_is_told_once_they_are_counted(world: Any) -> None:
    recipe = world.recipe("--train.steps", "null", "--train.epochs", "1", optim={"schedule": {"warmup_steps": 5000}})
    with pytest.raises(ConfigError, match=r"train\.epochs 1 are \d+ steps: optim\.schedule\.warmup_steps is 5000"):
        settle_length(recipe, read_manifest(recipe), build_policy(recipe))
