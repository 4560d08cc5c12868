"""What a run reads: bucket policies, notes behind captions, and steps and saves of whole epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars
import pytest
import torch

from frameloom.builders.data import build_plan, build_policy, read_manifest
from frameloom.checkpoint.reader import load_latest
from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import CacheError, CheckpointError, ConfigError
from frameloom.data.loading.loader import iterate_batches
from frameloom.sampling.load import load_model
from frameloom.sampling.pipeline import encode_prompts
from frameloom.training.caching import write_caches
from frameloom.training.feed import build_feed, count_steps, resolve_num_steps
from frameloom.training.run.resuming import ResumeChoices
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
    settled = resolve_num_steps(recipe, read_manifest(recipe), build_policy(recipe))
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
        resolve_num_steps(recipe, read_manifest(recipe), build_policy(recipe))


RATIO_TOKENS = "{video_sample_size: 32, image_sample_size: 64, token_sample_size: 64, video_sample_n_frames: 9"
POLICIES = {
    "fixed": "{height: 32, width: 32, frames: 5, batch: 4}",
    "multi_aspect": "{sizes: [[32, 32], [32, 48]], frames: 5, batch: 4}",
    "grouped": "{num_frames: 9, max_hxw: 4096, hw_stride: 16, train_fps: 8, batch: 4, too_long_factor: 50}",
    "ratio_tokens": RATIO_TOKENS + ", train_batch_size: 2, training_with_video_token_length: true, "
    "random_hw_adapt: true, random_frame_crop: true}",
    "token_budget": "{tokens: 64}",
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_trains_with_the_policy(world, policy: str) -> None:
    words = ["--data.policy", policy, f"--data.{policy}", POLICIES[policy], "--train.steps", "2"]
    if policy != "token_budget":
        words += ["--data.buckets", "null"]
    train(load_recipe(world.write_recipe(), words))
    lines = [json.loads(line) for line in (world.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {1, 2}
    assert all(line["train/loss"] > 0 for line in lines if "train/loss" in line)


@pytest.fixture
def scored(world) -> list[str]:
    """Overrides for the shared clips with motion scores."""
    table = polars.read_parquet(world.shared / "data" / "manifest.parquet")
    table.with_columns(score_vmafmotion=polars.int_range(polars.len()) / 4).write_parquet(world.folder / "m.parquet")
    return ["--data.manifest", str(world.folder / "m.parquet"), "--data.root", str(world.shared / "data")]


def captions(recipe) -> list[str]:
    feed = build_feed(recipe, bad_clips=recipe_folder(recipe))
    return [caption for batch in iterate_batches(feed.plan(0), feed.reader) for caption in batch.captions]


def recipe_folder(recipe):
    from pathlib import Path

    return Path(recipe.run.folder) / "bad_clips.jsonl"


def test_batches_carry_the_notes_with_and_without_a_text_cache(world, scored):
    text = {"note": {}}
    fresh = captions(world.recipe(*scored, text=text))
    cache = {"cache": {"text": str(world.folder / "text")}}
    recipe = world.recipe(*scored, text=text, data=cache)
    list(write_caches(recipe))
    assert captions(recipe) == fresh
    assert all(caption.endswith(" motion score.") for caption in fresh)
    assert any(" FPS, " in caption for caption in fresh)
    assert not any("FPS" in caption for caption in captions(world.recipe(*scored)))


def test_a_text_cache_made_with_another_note_is_refused(world, scored):
    cache = {"cache": {"text": str(world.folder / "text")}}
    list(write_caches(world.recipe(*scored, text={"note": {}}, data=cache)))
    for text, reason in (({}, "note.fps"), ({"note": {"motion": None}}, "note.motion")):
        with pytest.raises(CacheError, match=reason):
            train(world.recipe(*scored, text=text, data=cache))
    # How prompts are written is no matter of the cache.
    train(world.recipe(*scored, "--train.steps", "1", text={"note": {"in_sampling": "sentences"}}, data=cache))


def test_a_resumed_run_must_keep_its_notes_and_sampling_uses_them(world, scored):
    run = train(world.recipe(*scored, "--train.steps", "1", text={"note": {}}))
    with pytest.raises(CheckpointError, match=r"text\.note"):
        train(world.recipe(*scored, "--train.steps", "2"), ResumeChoices(accept_recipe_change=True))
    sampler = load_model(run, ["--sample.fps", "8"])
    states, null = encode_prompts(sampler, [sampler.request("a red circle")])
    said = sampler.text.encode(["a red circle 8.0 FPS, 4 motion score.", "a red circle", ""]).tokens_BKD
    assert torch.allclose(states.tokens_BKD[0], said[0], atol=1e-5)
    assert not torch.allclose(states.tokens_BKD[0], said[1], atol=1e-2)
    assert torch.allclose(null.tokens_BKD[0], said[2], atol=1e-5)


def test_a_note_that_says_nothing_is_refused(world):
    with pytest.raises(ConfigError, match="would say nothing"):
        world.recipe(text={"note": {"fps": False, "motion": None}})
