from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frameloom.config.loading.recipe import load_recipe, resolve
from frameloom.core.errors import ConfigError


def at(value: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--optim.lr", "1e-5"], "optim.lr", 1e-5),
        (["--optim.lr=1e-5"], "optim.lr", 1e-5),
        (["--data.buckets.256px.1", "[1.0, 45]"], "data.buckets.256px.1", [1.0, 45]),
        (["--data.buckets.256px", "{1: [1.0, 45]}"], "data.buckets.256px.1", [1.0, 45]),
        (['--data.buckets."256px_ar2.39:1".1', "[1, 4]"], "data.buckets", {"256px_ar2.39:1": {"1": [1, 4]}}),
        (["--train.ema", "null"], "train.ema", None),
        (["--train.recompute", "true"], "train.recompute", True),
        (["--text.encoders.0.max_length", "32"], "text.encoders.0.max_length", 32),
        (["--model.overrides.depth", "-4"], "model.overrides.depth", -4),
        (["--model.overrides.scale", "-1e-3"], "model.overrides.scale", -1e-3),
        (["--run.trackers", "[jsonl]"], "run.trackers", ["jsonl"]),
        (["--run.trackers.1", "jsonl"], "run.trackers", ["jsonl", "jsonl"]),
        (["--name", "2024"], "name", "2024"),
        (["--name", "'2024'"], "name", "2024"),
        (["--run.folder", "a: b #c"], "run.folder", "a: b #c"),
        (["--run.folder=--odd"], "run.folder", "--odd"),
        (["--vae.weights=a=b"], "vae.weights", "a=b"),
        (["--vae.weights", "null"], "vae.weights", None),
        (["--validation.where.split", "val"], "validation.where.split", "val"),
        (["--validation.where", "{split: val}"], "validation.where.split", "val"),
        (["--data.where", "{}"], "data.where", {}),
        (["--data.where", "frames > 9"], "data.where", "frames > 9"),
        (["--validation", "{every: 5, where: {split: val}}"], "validation.every", 5),
    ],
)
def test_a_key_is_set(recipe_file: Path, words: list[str], key: str, value: Any) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("64px: {1: [1.0, 8], 9: [[0.5, 0.75], 4]}", "{}"))
    found = at(resolve(recipe_file, words), key)
    assert found == value
    assert type(found) is type(value)


def test_the_last_override_wins_and_others_stay(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["--optim.lr", "1e-5", "--train.steps", "3", "--optim.lr=2e-5"])
    assert (recipe.optim.lr, recipe.train.steps) == (2e-5, 3)
    assert load_recipe(recipe_file).optim.lr == 1e-4


def test_a_key_inside_a_null_section_brings_it_back(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text() + "  ema: null\n")
    assert load_recipe(recipe_file).train.ema is None
    recipe = load_recipe(recipe_file, ["--train.ema.decay", "0.9"])
    assert recipe.train.ema is not None
    assert (recipe.train.ema.decay, recipe.train.ema.warmup) == (0.9, True)


def test_default_lists_can_be_changed_by_index(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["--text.encoders.0.max_length", "32"])
    assert (recipe.text.encoders[0].name, recipe.text.encoders[0].max_length) == ("minilm", 32)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--lr", "1e-5"], "--lr: the recipe has no key 'lr'; 'lr' belongs to optim: optim.lr"),
        (
            ["--optim.learning_rate", "1"],
            "--optim.learning_rate: optim has no key 'learning_rate'; did you mean optim.lr?",
        ),
        (["--opitm.lr", "1"], "did you mean optim.lr?"),
        (["--optim.lr"], "--optim.lr: a value is missing, expected a number above 0"),
        (["--optim.lr", "--train.steps", "3"], "--optim.lr: a value is missing"),
        (["--train.recompute"], "--train.recompute: a value is missing, expected true or false"),
        (["--optim.lr.x", "1"], "optim.lr has no keys inside; it takes a number above 0"),
        (["--text.encoders.max_length", "8"], "did you mean text.encoders.0.max_length?"),
        (["--text.encoders.3.max_length", "8"], "text.encoders has 1 item(s), counted from 0, and no item 3"),
        (
            ["--train.ema", "off"],
            "--train.ema: train.ema is 'off'; expected a section with the keys decay, warmup, every, on_cpu or null",
        ),
        (["--train.recompute", "yes"], "--train.recompute: train.recompute is 'yes'; expected true or false"),
        (["--train.steps", "1e3"], "train.steps is 1000.0; expected a whole number of at least 1 or null; write 1000"),
        (["--data.buckets.256px.1", "[1.0, 45"], "--data.buckets.256px.1: not valid YAML"),
        (["stray"], "stray: not an override; write --key value"),
        (["-x", "3"], "-x: not an override"),
        (["--optim..lr", "3"], "--optim..lr: the key is not written as parts with dots between"),
        (["--optim.", "3"], "--optim.: the key ends with a dot"),
        (["--run.folder", "a\udcff"], "--run.folder: the value 'a\\udcff' is not UTF-8 text"),
        (["--_base_", "x"], "the recipe has no key '_base_'"),
    ],
)
def test_a_wrong_override_is_refused_with_advice(recipe_file: Path, words: list[str], answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, words)
    assert answer in str(caught.value)


def test_all_mistakes_of_a_command_line_are_told_and_good_overrides_count(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("steps: 100", "stpes: 100"))
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, ["--lr", "1", "--train.steps", "5", "--smaple.steps", "2", "--optim.eps"])
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        "--lr",
        "--smaple.steps",
        "--optim.eps",
        f"{recipe_file}:13",
    ]
