"""Mistakes in the optimizer's keys are told before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.loading.render import render_yaml
from frameloom.config.rules.training import batch_sizes, scaled_rate
from frameloom.config.schema.optim import OWN_BETAS
from frameloom.core.errors import ConfigError

MISTAKES = {
    "two betas for came": (
        ["--optim.name", "came", "--optim.betas", "[0.9, 0.99]"],
        "optim.betas is [0.9, 0.99], but came takes a list of 3; write [0.9, 0.999, 0.9999], or remove it",
    ),
    "three betas for lion": (["--optim.name", "lion", "--optim.betas", "[0.9, 0.99, 0.9]"], "lion takes a list of 2"),
    "eps for came": (["--optim.name", "came", "--optim.eps", "1e-10"], "which came does not use; remove it"),
    "rate for prodigy": (["--optim.name", "prodigy", "--optim.lr", "20"], "the usual one of prodigy is 1"),
    "rates for prodigy": (
        ["--optim.name", "prodigy", "--optim.groups", "[{match: x, lr: 0.1}]"],
        "prodigy has one rate for all parameters",
    ),
    "group without match": (["--optim.groups", "[{lr: 0.1}]"], "optim.groups.0 needs the key 'match'"),
    "group without effect": (["--optim.groups", "[{match: x}]"], "give it lr or weight_decay"),
    "power of a cosine": (["--optim.schedule", "{name: cosine, power: 2}"], "but cosine has none; remove it"),
    "cycles of a constant": (["--optim.schedule.num_cycles", "2"], "a constant schedule does not fall"),
    "start without warm-up": (["--optim.schedule.start_share", "0.1"], "but there is no warm-up"),
    "no milestones": (["--optim.schedule.name", "multi_step"], "e.g. milestones: [200, 400]"),
    "milestones that fall": (
        ["--optim.schedule", "{name: multi_step, milestones: [9, 3]}"],
        "expected rising steps after the warm-up of 0",
    ),
    "fade without limit": (["--optim.clip_norm", "null", "--optim.clip_fade", "{}"], "there is no limit that could"),
    "frozen lora": (["--lora", "{}", "--optim.frozen", "[x]"], "with lora only the adapters train"),
    "trainable lora": (["--lora", "{}", "--optim.trainable", "[x]"], "with lora only the adapters train"),
    "scaled unevenly": (
        ["--optim.scale_lr", "true", "--data.buckets", "{64px: {1: [1.0, 8], 9: [1.0, 2]}}"],
        "batch sizes are 2 and 8, so there is no one factor",
    ),
    "scaled too far": (
        ["--optim.scale_lr", "true", "--optim.lr", "0.05", "--data.buckets", "{64px: {9: [1.0, 8]}}"],
        "makes the rate 0.4",
    ),
    "unknown optimizer": (["--optim.name", "adam"], "optim.name is 'adam'; expected adamw"),
}
RIGHT = {
    "prodigy at one": ["--optim.name", "prodigy", "--optim.lr", "1"],
    "milestones": ["--optim.schedule", "{name: multi_step, milestones: [3, 9], gamma: 0.5}"],
    "fade": ["--optim.clip_fade", "{}", "--optim.skip_spikes", "{ratio: 4}"],
    "groups": ["--optim.groups", "[{match: img_in, lr: 1e-6}, {match: '*norm*', weight_decay: 0}]"],
    "lora groups": ["--lora", "{}", "--optim.groups", "[{match: '*', lr: 1e-6}]"],
    "scaled": ["--optim.scale_lr", "true", "--data.buckets", "{64px: {9: [1.0, 8]}}"],
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told(recipe_file: Path, case: str) -> None:
    words, message = MISTAKES[case]
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, words)
    assert len(caught.value.problems) == 1 and message in caught.value.problems[0]


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_passes_and_reads_back(recipe_file: Path, tmp_path: Path, case: str) -> None:
    recipe = load_recipe(recipe_file, RIGHT[case])
    shown = tmp_path / "shown.yaml"
    shown.write_text(render_yaml(recipe))
    assert load_recipe(shown) == recipe


@pytest.mark.parametrize("name", OWN_BETAS)
def test_betas_left_out_are_the_optimizers_own(recipe_file: Path, name: str) -> None:
    assert load_recipe(recipe_file, ["--optim.name", name]).optim.betas == OWN_BETAS[name]


def test_scaled_rate_is_rate_times_batch_accumulation_and_processes(recipe_file: Path) -> None:
    words = ["--optim.lr", "1e-5", "--data.buckets", "{64px: {9: [1.0, 8]}}", "--train.accumulate", "3"]
    plain = load_recipe(recipe_file, words)
    scaled = load_recipe(recipe_file, [*words, "--optim.scale_lr", "true"])
    assert batch_sizes(scaled.data) == [8]
    assert scaled_rate(scaled, num_processes=2) == pytest.approx(1e-5 * 8 * 3 * 2)
    assert scaled_rate(plain, num_processes=2) == 1e-5
