"""Batches of as many tokens that do not take as long, and the setting that has devices wait less for each other."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.planner.devices import DEVICES
from frameloom.planner.estimate import measure_recipe, plan_run
from frameloom.planner.suggest import KEY, balance_tokens, find_attention
from tests.faults.warm import run_frameloom

BUCKETS = "{256px: {1: [1.0, 64], 9: [1.0, 64], 33: [1.0, 64], 65: [1.0, 64]}}"


def write_clips(folder: Path) -> Path:
    """A table of clips from pictures to two seconds; a plan reads no file of it."""
    lengths = [1] * 6000 + [12] * 6000 + [40] * 4000 + [70] * 2000
    table = pl.DataFrame(
        {
            "path": [f"{number}.mp4" for number in range(len(lengths))],
            "caption": ["a clip"] * len(lengths),
            "split": ["train"] * len(lengths),
            "kind": ["image" if frames == 1 else "video" for frames in lengths],
            "height": [256] * len(lengths),
            "width": [256] * len(lengths),
            "frames": lengths,
            "fps": [None if frames == 1 else 24.0 for frames in lengths],
        }
    )
    table.write_parquet(folder / "clips.parquet")
    return folder / "clips.parquet"


def words(clips: Path) -> list[str]:
    return [
        *("--data.manifest", str(clips), "--validation", "null"),
        *("--data.policy", "token_budget", "--data.token_budget", "{tokens: 9000}", "--data.buckets", BUCKETS),
    ]


def load(clips: Path, *more: str) -> Recipe:
    return load_recipe("shapes/demo", [*words(clips), *more])


def test_devices_wait_less_when_the_square_of_long_clips_counts(tmp_path: Path) -> None:
    clips = write_clips(tmp_path)
    recipe = load(clips)
    measured = measure_recipe(recipe)
    plan = plan_run(recipe, DEVICES["cpu"], 4, measured=measured)
    found = balance_tokens(recipe, plan, 4, measured)
    assert plan.epoch is not None and found is not None and found.imbalance is not None
    waits, waits_less = plan.epoch.imbalance - 1, found.imbalance - 1
    assert waits_less < waits / 3
    told = load(clips, f"--{KEY}", str(found.attention))
    again = plan_run(told, DEVICES["cpu"], 4, measured=measured)
    assert again.epoch is not None and again.epoch.imbalance == found.imbalance
    assert balance_tokens(told, again, 4, measured) is None


def test_the_place_where_attention_weighs_as_much_is_that_of_the_operations(tmp_path: Path) -> None:
    recipe = load(write_clips(tmp_path))
    plan = plan_run(recipe, DEVICES["cpu"], 1, with_data=False)
    attention = find_attention(plan)
    assert attention is not None
    for item in plan.buckets:
        flops = item.flops / item.bucket.batch_size
        cost = item.tokens * (1 + item.tokens / attention)
        longest = max(plan.buckets, key=lambda one: one.tokens)
        expected = longest.flops / longest.bucket.batch_size * cost
        expected /= longest.tokens * (1 + longest.tokens / attention)
        assert flops == pytest.approx(expected, rel=0.1)


def test_other_policies_are_left_alone(tmp_path: Path) -> None:
    recipe = load(write_clips(tmp_path), "--data.policy", "grid", "--data.token_budget", "null")
    measured = measure_recipe(recipe)
    plan = plan_run(recipe, DEVICES["cpu"], 2, with_data=False, measured=measured)
    assert balance_tokens(recipe, plan, 2, measured) is None


def test_the_command_tells_the_setting_and_writes_it(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine.yaml", tmp_path / "balanced.yaml"
    budget = f"{{policy: token_budget, token_budget: {{tokens: 9000}}, buckets: {BUCKETS}}}"
    mine.write_text(f"_base_: shapes/demo\ndata: {budget}\n")
    done = run_frameloom("plan", str(mine), "--no-data", "--devices", "4", "--write", str(out))
    assert done.returncode == 0, done.stderr
    assert KEY in done.stdout and "attention" in out.read_text() and "tokens" not in out.read_text()
    told = load_recipe(str(out)).data.token_budget
    assert told is not None and told.tokens == 9000 and told.attention
    again = run_frameloom("plan", str(out), "--no-data", "--devices", "4", "--json")
    assert json.loads(again.stdout)["change"] is None
