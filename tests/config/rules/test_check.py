from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.config.loading.recipe import load_recipe, load_with_locations
from frameloom.config.rules.check import check_files
from frameloom.core.errors import ConfigError
from frameloom.models.registry import VAES

SPLIT = ["--validation.where.split", "val"]

RIGHT = {
    "image only": ["--data.buckets", "{64px: {1: [1.0, 4]}}"],
    "ratio": ["--data.buckets", "{'256px_ar16:9': {5: [1.0, 4]}, 720p: {1: [0.5, 1]}, 64px_max: {9: [1.0, 4]}}"],
    "two tokens": ["--data.buckets", "{32px: {1: [1.0, 4]}}"],
    "longest text": ["--text.encoders.0.max_length", "512"],
    "warm-up one short": ["--optim.schedule.warmup_steps", "99"],
    "save after the end": ["--train.save_every", "1000"],
    "largest rate": ["--optim.lr", "0.1"],
    "an hour": ["--data.timeout_s", "3600"],
    "cache": ["--data.cache.latents", "cache", "--data.frame_start", "first"],
    "text cache is not random": ["--data.cache.text", "cache"],
    "bf16 with fp32 cache": ["--train.precision", "bf16", "--data.cache.text", "cache"],
    "autoencoder without weights": ["--task", "autoencoder", "--vae.weights", "null"],
    "autoencoder does not sample": ["--task", "autoencoder", "--sample.height", "70"],
    "v with gamma": ["--objective.kind", "v", "--objective.min_snr_gamma", "5"],
    "defaults of the other kind": ["--objective.kind", "v", "--objective.distribution", "logit_normal"],
    "validation apart": SPLIT,
    "falling schedule": ["--optim.schedule", "{name: cosine, min_share: 0.1}"],
    "tall sample": ["--sample.height", "480", "--sample.width", "256", "--sample.frames", "1"],
}


@pytest.mark.parametrize("overrides", RIGHT.values(), ids=RIGHT.keys())
def test_what_is_right_passes(recipe_file: Path, overrides: list[str]) -> None:
    load_recipe(recipe_file, overrides)


@pytest.mark.parametrize("frames", range(1, 40))
def test_the_advised_frame_counts_are_legal(recipe_file: Path, frames: int) -> None:
    words = ["--sample.frames", str(frames)]
    if (frames - 1) % 4 == 0:
        assert load_recipe(recipe_file, words).sample.frames == frames
        return
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, words)
    advised = [int(word) for word in str(caught.value).partition("; write ")[2].split() if word.isdecimal()]
    assert len(advised) == 2
    assert advised[0] < frames < advised[1]
    assert all(VAES["wfvae"].lengths().accepts(count) for count in advised)


def test_types_and_rules_are_told_together(recipe_file: Path) -> None:
    words = ["--text.dropout", "10", "--sample.width", "70", "--optim.lr", "10", "--optim.schedule.min_share", "0.5"]
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, words)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "--text.dropout",
        "--sample.width",
        "--optim.schedule.min_share",
        "--optim.lr",
    ]


def test_a_rule_does_not_echo_a_value_that_is_already_wrong(recipe_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, ["--train.steps", "0", "--optim.schedule.warmup_steps", "5000"])
    assert len(caught.value.problems) == 1
    with pytest.raises(ConfigError, match="warmup_steps is 5000"):  # alone, the rule does speak
        load_recipe(recipe_file, ["--optim.schedule.warmup_steps", "5000"])


def test_files_are_looked_for(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recipe_file.parent
    monkeypatch.chdir(folder)
    recipe, locations = load_with_locations(
        "tiny.yaml", ["--data.cache.text", "cache", "--text.encoders.0.path", "tiny.yaml"]
    )
    (folder / "clip.parquet").touch()
    (folder / "vae.safetensors").touch()
    with pytest.raises(ConfigError) as caught:
        check_files(recipe, locations=locations)
    assert caught.value.problems == [
        "tiny.yaml:6: data.manifest is 'clips.parquet', which does not exist; expected a file; "
        "did you mean 'clip.parquet'?",
        "--text.encoders.0.path: text.encoders.0.path is 'tiny.yaml', which is not a folder; name a folder",
        "--data.cache.text: data.cache.text is 'cache', which does not exist; expected a folder; "
        "make it with: frameloom data cache RECIPE",
    ]
    (folder / "clip.parquet").rename("clips.parquet")
    right = load_recipe("tiny.yaml", ["--data.cache.text", "cache"])
    check_files(right, skip_caches=True)
    with pytest.raises(ConfigError, match=r"recipe: data\.cache\.text is 'cache'"):
        check_files(right)
    (folder / "cache").mkdir()
    check_files(right)
