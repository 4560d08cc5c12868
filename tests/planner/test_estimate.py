"""A plan as its user sees it: tables, budgets, and the change that makes a recipe fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import ConfigError
from frameloom.planner.devices import DEVICES, choose_device
from frameloom.planner.estimate import RunPlan, measure_recipe, plan_run
from frameloom.planner.suggest import suggest_change
from tests.faults.warm import run_frameloom

BUCKETS = "{64px: {1: [1.0, 4], 9: [1.0, 8]}}"


def plan(*overrides: str, memory: str = "1GB", devices: int = 1) -> RunPlan:
    recipe = load_recipe("shapes/demo", ["--data.buckets", BUCKETS, *overrides])
    return plan_run(recipe, choose_device("cpu", memory), devices, with_data=False)


def largest(found: RunPlan) -> float:
    return max(item.total for item in found.buckets)


def test_a_budget_that_holds_everything_needs_no_change() -> None:
    recipe = load_recipe("shapes/demo", ["--data.buckets", BUCKETS])
    found = plan_run(recipe, choose_device("cpu", "16GB"), 1, with_data=False)
    assert not found.breaking and suggest_change(recipe, found, 1, measure_recipe(recipe)) is None


def test_what_recompute_and_sharding_save_is_seen() -> None:
    base, again = plan(devices=4), plan("--train.recompute", "true", devices=4)
    without, with_it = (max(item.activations for item in found.buckets) for found in (base, again))
    assert with_it < 0.7 * without
    sharded = [plan("--parallel.zero", str(zero), devices=4).resident for zero in (0, 1, 2)]
    assert sharded[1].optimizer == pytest.approx(sharded[0].optimizer / 4)
    assert sharded[1].gradients == sharded[0].gradients > sharded[2].gradients
    weights = [plan("--parallel.zero", str(zero), devices=4).resident.weights for zero in (2, 3)]
    assert weights[1] < weights[0]
    # The trainer adds whole gradients up until the last of several passes.
    several = plan("--parallel.zero", "2", "--train.accumulate", "2", devices=4).resident
    assert several.gradients == sharded[0].gradients


def test_a_bucket_that_breaks_the_budget_gets_the_smallest_change_that_helps() -> None:
    recipe = load_recipe("shapes/demo", ["--data.buckets", BUCKETS])
    needed, least = largest(plan()), largest(plan("--train.recompute", "true"))
    assert least < 0.95 * needed
    tight = choose_device("cpu", f"{(needed + least) / 2e6}MB")
    found = plan_run(recipe, tight, 1, with_data=False)
    assert [item.bucket.frames for item in found.breaking][:1] == [9]
    change = suggest_change(recipe, found, 1, measure_recipe(recipe))
    assert change is not None and change.settings == {"train.recompute": True} and not change.plan.breaking


def test_smaller_batches_come_last_and_fit() -> None:
    recipe = load_recipe("shapes/demo", ["--data.buckets", BUCKETS])
    least = largest(plan("--train.recompute", "true"))
    found = plan_run(recipe, choose_device("cpu", f"{0.96 * least / 1e6}MB"), 1, with_data=False)
    change = suggest_change(recipe, found, 1, measure_recipe(recipe))
    assert change is not None and not change.plan.breaking
    cells = change.settings["data.buckets"]["64px"]
    assert 1 <= cells[9][1] < 8 and cells[1][1] == 4


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    found = plan(memory="200MB")
    batch = min(item.largest_batch for item in found.buckets if item.bucket.frames == 9)
    assert batch >= 1
    for size, fits in ((batch, True), (batch + 1, False)):
        again = plan("--data.buckets", f"{{64px: {{1: [1.0, 4], 9: [1.0, {size}]}}}}", memory="200MB")
        assert (not again.breaking) == fits


def run(*words: str) -> str:
    """What `frameloom` prints; it must succeed."""
    done = run_frameloom("plan", *words, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_missing_manifest_is_told_with_the_way_around_it(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"_base_: shapes/demo\ndata: {{manifest: {tmp_path / 'none.parquet'}}}\n")
    done = run_frameloom("plan", str(recipe), timeout=280)
    assert done.returncode == 2 and done.stdout == ""
    assert f"{tmp_path / 'none.parquet'}: no such file" in done.stderr and "--no-data" in done.stderr


def test_the_command_prints_a_table_and_writes_a_recipe_that_fits(tmp_path: Path) -> None:
    recipe, out = tmp_path / "mine.yaml", tmp_path / "fits.yaml"
    recipe.write_text(f"_base_: shapes/demo\ndata: {{buckets: {BUCKETS}}}\n")
    memory = f"{0.8 * largest(plan()) / 1e6}MB"
    shown = run(str(recipe), "--no-data", "--memory", memory, "--write", str(out))
    assert "64px 9f" in shown and "train.recompute" in shown
    again = json.loads(run(str(out), "--no-data", "--memory", memory, "--json"))
    assert all(item["fits"] for item in again["buckets"])


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    """Neither the recipe itself, which would come to inherit from itself, nor any other; and nothing is measured."""
    recipe, other = tmp_path / "mine.yaml", tmp_path / "notes.txt"
    recipe.write_text(f"# tuned by hand\n_base_: shapes/demo\ndata: {{buckets: {BUCKETS}}}\n")
    other.write_text("notes")
    before = recipe.read_text()
    for file in (recipe, other):
        done = run_frameloom("plan", recipe, "--no-data", "--memory", "60MB", "--write", file, timeout=280)
        assert done.returncode == 2 and done.stdout == "" and f"--write {file}: exists; name a new file" in done.stderr
    assert recipe.read_text() == before and other.read_text() == "notes"


def test_the_output_of_json_is_json_whatever_is_written(tmp_path: Path) -> None:
    out, no = tmp_path / "fits.yaml", tmp_path / "no.yaml"
    words = ("plan", "shapes/demo", "--no-data", "--json", "--data.buckets", BUCKETS)
    tight = run_frameloom(*words, "--memory", f"{0.8 * largest(plan()) / 1e6}MB", "--write", out, timeout=280)
    assert json.loads(tight.stdout)["change"] and f"wrote {out}" in tight.stderr
    assert load_recipe(out).train.recompute is True and len(load_recipe(out).data.buckets or {}) == 1
    roomy = run_frameloom(*words, "--write", no, timeout=280)
    assert json.loads(roomy.stdout)["change"] is None
    assert f"nothing to change; {no} was not written" in roomy.stderr and not no.exists()


def test_a_step_has_as_many_micro_batches_as_the_run_takes(tmp_path: Path) -> None:
    """With parallel.data they are the same on any number of devices, and gradients of one add up to the next."""
    from frameloom.builders.data import build_policy, read_manifest
    from frameloom.demo.shapes_set import write_shapes
    from frameloom.training.feed import count_steps

    write_shapes(tmp_path / "data", count=24, seed=1, num_workers=1)
    words = ["--data.manifest", str(tmp_path / "data" / "manifest.parquet"), "--validation", "null"]
    words += ["--data.buckets", "{64px: {1: [1.0, 2], 9: [1.0, 2]}}"]
    shared = load_recipe("shapes/demo", [*words, "--parallel.data", "4"])
    num_steps = count_steps(shared, read_manifest(shared), build_policy(shared), 0, 4)
    measured = measure_recipe(shared)
    found = [plan_run(shared, DEVICES["cpu"], count, measured=measured) for count in (1, 2, 3)]
    epochs = [one.epoch for one in found if one.epoch is not None]
    assert [epoch.steps for epoch in epochs] == 3 * [num_steps]
    # Four micro-batches are two rounds of three devices, of which two turns are empty.
    assert epochs[0].padding == 0.0 <= epochs[1].padding < 0.1 < 0.25 < epochs[2].padding <= 1 / 3
    alone = plan_run(load_recipe("shapes/demo", words), DEVICES["cpu"], 1, measured=measured)
    assert alone.epoch is not None and alone.epoch.steps > epochs[0].steps
    assert found[0].buckets[0].total > alone.buckets[0].total
    with pytest.raises(ConfigError, match=r"raise parallel.data to 5"):
        plan_run(shared, DEVICES["cpu"], 5, measured=measured)


def test_an_epoch_is_planned_from_the_clips(tmp_path: Path) -> None:
    from frameloom.demo.shapes_set import write_shapes

    write_shapes(tmp_path / "data", count=24, seed=1, num_workers=1)
    recipe = load_recipe(
        "shapes/demo",
        [
            "--data.buckets",
            BUCKETS,
            "--data.manifest",
            str(tmp_path / "data" / "manifest.parquet"),
            "--validation",
            "null",
        ],
    )
    one, two, three = (plan_run(recipe, DEVICES["cpu"], count).epoch for count in (1, 2, 3))
    assert one is not None and two is not None and three is not None
    # Two of the 24 are held out.
    assert one.clips == two.clips == 22 and one.steps > two.steps
    assert one.imbalance == 1.0 <= two.imbalance
    assert one.padding == 0.0 < three.padding == pytest.approx(1 - one.steps / (3 * three.steps))
    assert one.seconds > two.seconds and one.cache_bytes > 0
