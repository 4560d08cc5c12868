"""Proposed changes of every bucket policy: each fits when it is planned again as a recipe, the smallest first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.planner.devices import DEVICES, choose_device
from frameloom.planner.estimate import Measured, RunPlan, measure_recipe, plan_run
from frameloom.planner.suggest import (
    KEY,
    Change,
    apply_settings,
    balance_tokens,
    find_attention,
    fitting_tokens,
    render_recipe,
    suggest_change,
)
from tests.faults.warm import run_frameloom

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


def plan_tight(
    words: list[str],
    *,
    device: str = "cpu",
    num_devices: int = 1,
    share: float = 1.0,
    share_of_passes: float | None = None,
) -> tuple[RunPlan, Change | None]:
    """The demo's plan, and what is proposed, where a device has a share of what the largest bucket needs: of all, or
    of what the passes need beside what rests on the device."""
    recipe = load_recipe("shapes/demo", words)
    measured = measure_recipe(recipe)
    roomy = plan_run(recipe, DEVICES[device], num_devices, with_data=False, measured=measured)
    needed, resting = max(item.total for item in roomy.buckets), roomy.resident.total
    memory = share * needed if share_of_passes is None else resting + share_of_passes * (needed - resting)
    found = plan_run(recipe, replace(DEVICES[device], memory=memory), num_devices, with_data=False, measured=measured)
    assert found.breaking
    return found, suggest_change(recipe, found, num_devices, measured)


@pytest.mark.parametrize("policy", POLICIES)
def test_smaller_batches_are_proposed_for_every_policy(policy: str) -> None:
    words = list(POLICIES[policy])
    found, change = plan_tight(words, share_of_passes=0.4)
    assert change is not None and KEYS[policy] in change.settings
    given = [word for key in change.settings for word in (f"--{key}", str(_value(change.settings[key])))]
    again = plan_run(load_recipe("shapes/demo", [*words, *given]), found.device, 1, with_data=False)
    assert not again.breaking


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


def suggest(words: list[str], *, num_devices: int = 1, share: float) -> dict[str, object] | None:
    _, change = plan_tight(words, num_devices=num_devices, share=share)
    return None if change is None else change.settings


def test_all_blocks_are_recomputed_before_a_batch_shrinks() -> None:
    words = ["--data.buckets", "{64px: {9: [1.0, 32]}}"]
    assert suggest([*words, "--train.recompute", "{every: 2}"], share=0.97) == {"train.recompute": True}
    # The control: where all are, as true or as a section, only the batch is left.
    for everything in ("true", "{every: 1}"):
        found = suggest([*words, "--train.recompute", everything], share=0.97)
        assert found is not None and list(found) == ["data.buckets"]


def test_nothing_is_proposed_that_a_run_would_refuse() -> None:
    """Weights in half precision are not split over devices."""
    words = ["--data.buckets", "{64px: {9: [1.0, 32]}}", "--train.recompute", "true", "--train.precision", "bf16"]
    half = [*words, "--train.weights_precision", "bf16"]
    plain, found = (suggest(one, num_devices=2, share=0.75) for one in (words, half))
    assert plain is not None and plain["parallel.zero"] == 3
    assert found is not None and found["parallel.zero"] == 1 and "data.buckets" in found


def test_a_clip_that_is_too_long_for_the_autoencoder_is_shortened() -> None:
    words = ["--data.policy", "fixed", *NONE, "--data.fixed", "{height: 64, width: 64, frames: 65, batch: 1}"]
    _, change = plan_tight([*words, "--data.cache.latents", "null"], share_of_passes=0.4)
    assert change is not None and not change.plan.breaking
    assert change.plan.buckets[0].bucket.frames == change.settings["data.fixed.frames"] < 65


@pytest.mark.parametrize("name", ["shapes/long-i2v", "latte/17x512x512", "sdxl/lora"])
def test_shipped_recipes_are_planned_on_eight_devices(name: str) -> None:
    recipe = load_recipe(name, [])
    measured = measure_recipe(recipe)
    found = plan_run(recipe, DEVICES["h100"], 8, with_data=False, measured=measured)
    change = suggest_change(recipe, found, 8, measured)
    assert not found.breaking or (change is not None and not change.plan.breaking)


ONE_BUCKET = ["--data.buckets", "{64px: {9: [1.0, 2]}}"]
OFFLOADED = {"optim.offload": True, "train.recompute": True}


def test_state_on_the_host_is_proposed_on_one_gpu_before_smaller_batches() -> None:
    recipe = load_recipe("shapes/demo", ONE_BUCKET)
    measured = measure_recipe(recipe)
    plain = plan_run(recipe, choose_device("a100", None), 1, with_data=False, measured=measured)
    offloaded = load_recipe("shapes/demo", [*ONE_BUCKET, "--optim.offload", "true", "--train.recompute", "true"])
    least = plan_run(offloaded, plain.device, 1, with_data=False)
    assert least.resident.optimizer == 0 < plain.resident.optimizer and least.resident.weights == plain.resident.weights
    budget = f"{1.01 * max(item.total for item in least.buckets) / 1e6}MB"
    tight = plan_run(recipe, choose_device("a100", budget), 1, with_data=False, measured=measured)
    change = suggest_change(recipe, tight, 1, measured)
    assert tight.breaking and change is not None and change.settings == OFFLOADED and not change.plan.breaking
    # The control: a CPU has no other memory, and the batch has to shrink.
    bare = plan_run(recipe, choose_device("cpu", budget), 1, with_data=False, measured=measured)
    other = suggest_change(recipe, bare, 1, measured)
    assert other is None or "data.buckets" in other.settings


TOKEN_BUCKETS = "{64px: {1: [1.0, 400], 9: [1.0, 400]}}"
HOST = choose_device("cpu", "16GB")


def load_budget(tokens: int) -> Recipe:
    words = ["--data.policy", "token_budget", "--data.token_budget", f"{{tokens: {tokens}}}"]
    return load_recipe("shapes/demo", [*words, "--data.buckets", TOKEN_BUCKETS, "--train.recompute", "true"])


def plan_budget(tokens: int, memory: float, measured: Measured) -> RunPlan:
    return plan_run(load_budget(tokens), replace(HOST, memory=memory), 1, with_data=False, measured=measured)


def test_the_budget_found_fits_and_one_clip_more_does_not() -> None:
    recipe = load_budget(10_000)
    measured = measure_recipe(recipe)
    needed = max(item.total for item in plan_budget(10_000, 16e9, measured).buckets)
    tight = plan_budget(10_000, 0.7 * needed, measured)
    assert tight.breaking
    tokens = fitting_tokens(recipe, tight)
    assert tokens is not None and 0 < tokens < 10_000
    assert not plan_budget(tokens, 0.7 * needed, measured).breaking
    assert plan_budget(tokens + 1, 0.7 * needed, measured).breaking
    change = suggest_change(recipe, tight, 1, measured)
    assert change is not None and not change.plan.breaking
    assert change.settings == {"data.token_budget.tokens": tokens}


def test_without_room_for_a_clip_there_is_no_budget_and_with_much_room_the_limits_bind() -> None:
    recipe = load_budget(10_000)
    measured = measure_recipe(recipe)
    assert fitting_tokens(recipe, plan_budget(10_000, 1e6, measured)) is None
    roomy = plan_budget(10_000, 1e15, measured)
    assert fitting_tokens(recipe, roomy) == 400 * max(item.tokens for item in roomy.buckets)


LENGTHS = "{256px: {1: [1.0, 64], 9: [1.0, 64], 33: [1.0, 64], 65: [1.0, 64]}}"


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


def clip_words(clips: Path) -> list[str]:
    return [
        *("--data.manifest", str(clips), "--validation", "null"),
        *("--data.policy", "token_budget", "--data.token_budget", "{tokens: 9000}", "--data.buckets", LENGTHS),
    ]


def load_clips(clips: Path, *more: str) -> Recipe:
    return load_recipe("shapes/demo", [*clip_words(clips), *more])


def test_devices_wait_less_when_the_square_of_long_clips_counts(tmp_path: Path) -> None:
    clips = write_clips(tmp_path)
    recipe = load_clips(clips)
    measured = measure_recipe(recipe)
    plan = plan_run(recipe, DEVICES["cpu"], 4, measured=measured)
    found = balance_tokens(recipe, plan, 4, measured)
    assert plan.epoch is not None and found is not None and found.plan.epoch is not None
    waits, waits_less = plan.epoch.imbalance - 1, found.plan.epoch.imbalance - 1
    assert waits_less < waits / 3
    told = load_clips(clips, f"--{KEY}", str(found.settings[KEY]))
    again = plan_run(told, DEVICES["cpu"], 4, measured=measured)
    assert again.epoch is not None and again.epoch.imbalance == found.plan.epoch.imbalance
    assert balance_tokens(told, again, 4, measured) is None


def test_the_place_where_attention_weighs_as_much_is_that_of_the_operations(tmp_path: Path) -> None:
    recipe = load_clips(write_clips(tmp_path))
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
    recipe = load_clips(write_clips(tmp_path), "--data.policy", "grid", "--data.token_budget", "null")
    measured = measure_recipe(recipe)
    plan = plan_run(recipe, DEVICES["cpu"], 2, with_data=False, measured=measured)
    assert balance_tokens(recipe, plan, 2, measured) is None


def test_the_command_tells_the_setting_and_writes_it(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine.yaml", tmp_path / "balanced.yaml"
    budget = f"{{policy: token_budget, token_budget: {{tokens: 9000}}, buckets: {LENGTHS}}}"
    mine.write_text(f"_base_: shapes/demo\ndata: {budget}\n")
    done = run_frameloom("plan", str(mine), "--no-data", "--devices", "4", "--write", str(out))
    assert done.returncode == 0, done.stderr
    assert KEY in done.stdout and "attention" in out.read_text() and "tokens" not in out.read_text()
    told = load_recipe(str(out)).data.token_budget
    assert told is not None and told.tokens == 9000 and told.attention
    again = run_frameloom("plan", str(out), "--no-data", "--devices", "4", "--json")
    assert json.loads(again.stdout)["change"] is None


def test_the_studio_shows_the_change_that_fits_and_the_one_that_balances(tmp_path: Path) -> None:
    from frameloom.studio.recipe.controller import show_plan
    from frameloom.studio.server.context import StudioContext

    context, recipe = StudioContext(tmp_path / "root", tmp_path / "scratch"), load_clips(tmp_path / "absent.parquet")
    shown = show_plan(context, recipe, "cpu", 1, "100MB")
    assert "Better: with data.token_budget.attention: " in shown and "the devices of a step take alike" in shown
    assert "do not fit, the worst is" in shown
