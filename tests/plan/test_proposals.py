"""Every bucket policy gets a proposal that fits when it is planned again, as a recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from frameloom.cli.plan import _write_recipe
from frameloom.config.load import load_recipe
from frameloom.plan.devices import DEVICES
from frameloom.plan.estimate import measure_recipe, plan_run
from frameloom.plan.suggest import suggest_change

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
    _write_recipe(tmp_path / "fits.yaml", "sdxl/finetune", {"data.fixed.batch": 3, "vae.mini_batch": 1})
    recipe = load_recipe(str(tmp_path / "fits.yaml"), [])
    assert recipe.data.fixed is not None and recipe.vae.mini_batch == 1
    assert (recipe.data.fixed.batch, recipe.data.fixed.height) == (3, 1024)


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
