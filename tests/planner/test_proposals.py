"""Every bucket policy gets a proposal that fits when it is planned again, as a recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.planner.devices import DEVICES
from frameloom.planner.estimate import measure_recipe, plan_run
from frameloom.planner.suggest import apply_settings, render_recipe, suggest_change

NONE = ("--data.buckets", "null", "--train.recompute", "true")
POLICIES = {
    "grid": ("--data.buckets", "{64px: {9: [1.0, 64]}}", "--train.recompute", "true"),
    "token_budget": (
        *("--data.policy", "token_budget", "--data.token_budget", "{tokens: 10000}"),
        *("--data.buckets", "{64px: {9: [1.0, 64]}}", "--train.recompute", "true"),
    ),
    "ratio_tokens": (
        *("--data.policy", "ratio_tokens", *NONE, "--data.ratio_tokens"),
        "{video_sample_size: 64, image_sample_size: 64, token_sample_size: 64, video_sample_n_frames: 9, "
        "train_batch_size: 24, training_with_video_token_length: true}",
    ),
    "grouped": (
        *("--data.policy", "grouped", *NONE, "--data.grouped"),
        "{num_frames: 9, batch: 64, force_resolution: true, max_height: 64, max_width: 64}",
    ),
    "multi_aspect": (
        *("--data.policy", "multi_aspect", *NONE),
        *("--data.multi_aspect", "{sizes: [[64, 64], [64, 96]], batch: 64}"),
    ),
    "fixed": (
        *("--data.policy", "fixed", *NONE),
        *("--data.fixed", "{height: 64, width: 64, frames: 9, batch: 64, image_batch: 8}"),
    ),
}
KEYS = {
    "grid": "data.buckets",
    "token_budget": "data.token_budget.tokens",
    "ratio_tokens": "data.ratio_tokens.train_batch_size",
    "grouped": "data.grouped.batch",
    "multi_aspect": "data.multi_aspect.batch",
    "fixed": "data.fixed.batch",
}


@pytest.mark.parametrize("policy", POLICIES)
def test_smaller_batches_are_proposed_for_every_policy(policy: str) -> None:
    words = list(POLICIES[policy])
    recipe = load_recipe("shapes/demo", words)
    measured = measure_recipe(recipe)
    roomy = plan_run(recipe, DEVICES["cpu"], 1, with_data=False, measured=measured)
    room = max(item.total for item in roomy.buckets) - roomy.resident.total
    tight = replace(DEVICES["cpu"], memory=roomy.resident.total + 0.4 * room)
    found = plan_run(recipe, tight, 1, with_data=False, measured=measured)
    change = suggest_change(recipe, found, 1, measured)
    assert found.breaking and change is not None and KEYS[policy] in change.settings
    given = [word for key in change.settings for word in (f"--{key}", str(_value(change.settings[key])))]
    assert not plan_run(load_recipe("shapes/demo", [*words, *given]), tight, 1, with_data=False).breaking


def _value(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def test_a_change_inside_a_section_is_written_beside_what_stands_there(tmp_path: Path) -> None:
    text = render_recipe("sdxl/finetune", [], {"data.fixed.batch": 3, "vae.mini_batch": 1})
    (tmp_path / "fits.yaml").write_text(text)
    recipe = load_recipe(str(tmp_path / "fits.yaml"), [])
    assert recipe.data.fixed is not None and recipe.vae.mini_batch == 1
    assert (recipe.data.fixed.batch, recipe.data.fixed.height) == (3, 1024)


def test_a_written_recipe_is_the_one_that_was_planned(tmp_path: Path) -> None:
    """With the overrides of the plan: whole sections, single keys, items of lists, and keys that they take away."""
    mine, out = tmp_path / "mine.yaml", tmp_path / "fits.yaml"
    mine.write_text("_base_: shapes/demo\nname: mine\nmodel: {overrides: {hidden_size: 96}}\n")
    words = [
        *("--model.overrides", "{depth: 4}", "--train.accumulate", "4", "--train.ema", "null"),
        *("--text.encoders.0.max_length", "11", "--data.buckets", "{64px: {9: [0.5, 64]}}", "--name", "7"),
    ]
    settings = {"train.recompute": True, "data.buckets": {"64px": {9: [0.5, 3]}}, "optim.offload": True}
    out.write_text(render_recipe(str(mine), words, settings))
    planned = apply_settings(load_recipe(mine, words), settings)
    assert load_recipe(out) == planned != load_recipe(mine, words)


def test_a_folder_with_the_name_of_a_shipped_recipe_is_no_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shapes" / "demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    Path("fits.yaml").write_text(render_recipe("shapes/demo", [], {"train.recompute": True}))
    assert load_recipe("fits.yaml").train.recompute is True


def suggest(words: list[str], *, device: str = "cpu", num_devices: int = 1, short: float) -> dict[str, object] | None:
    """What is proposed for the demo when a device has `short` of what its largest bucket needs."""
    recipe = load_recipe("shapes/demo", words)
    measured = measure_recipe(recipe)
    roomy = plan_run(recipe, DEVICES[device], num_devices, with_data=False, measured=measured)
    tight = replace(DEVICES[device], memory=short * max(item.total for item in roomy.buckets))
    found = plan_run(recipe, tight, num_devices, with_data=False, measured=measured)
    assert found.breaking
    change = suggest_change(recipe, found, num_devices, measured)
    return None if change is None else change.settings


def test_all_blocks_are_recomputed_before_a_batch_shrinks() -> None:
    words = ["--data.buckets", "{64px: {9: [1.0, 32]}}"]
    assert suggest([*words, "--train.recompute", "{every: 2}"], short=0.97) == {"train.recompute": True}
    # The control: where all are, as true or as a section, only the batch is left.
    for everything in ("true", "{every: 1}"):
        found = suggest([*words, "--train.recompute", everything], short=0.97)
        assert found is not None and list(found) == ["data.buckets"]


def test_nothing_is_proposed_that_a_run_would_refuse() -> None:
    """Weights in half precision are not split over devices."""
    words = ["--data.buckets", "{64px: {9: [1.0, 32]}}", "--train.recompute", "true", "--train.precision", "bf16"]
    half = [*words, "--train.weights_precision", "bf16"]
    plain, found = (suggest(one, num_devices=2, short=0.75) for one in (words, half))
    assert plain is not None and plain["parallel.zero"] == 3
    assert found is not None and found["parallel.zero"] == 1 and "data.buckets" in found


def test_a_clip_that_is_too_long_for_the_autoencoder_is_shortened() -> None:
    words = ["--data.policy", "fixed", *NONE, "--data.fixed", "{height: 64, width: 64, frames: 65, batch: 1}"]
    recipe = load_recipe("shapes/demo", [*words, "--data.cache.latents", "null"])
    measured = measure_recipe(recipe)
    roomy = plan_run(recipe, DEVICES["cpu"], 1, with_data=False, measured=measured)
    room = roomy.buckets[0].total - roomy.resident.total
    tight = replace(DEVICES["cpu"], memory=roomy.resident.total + 0.4 * room)
    found = plan_run(recipe, tight, 1, with_data=False, measured=measured)
    change = suggest_change(recipe, found, 1, measured)
    assert change is not None and not change.plan.breaking
    assert change.plan.buckets[0].bucket.frames == change.settings["data.fixed.frames"] < 65


@pytest.mark.parametrize("name", ["shapes/long-i2v", "latte/17x512x512", "sdxl/lora"])
def test_shipped_recipes_are_planned_on_eight_devices(name: str) -> None:
    recipe = load_recipe(name, [])
    measured = measure_recipe(recipe)
    found = plan_run(recipe, DEVICES["h100"], 8, with_data=False, measured=measured)
    change = suggest_change(recipe, found, 8, measured)
    assert not found.breaking or (change is not None and not change.plan.breaking)
