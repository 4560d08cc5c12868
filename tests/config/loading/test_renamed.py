"""Old names of keys are read, in files, on the command line and in recipes that are kept with runs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from frameloom.config.loading.recipe import load_recipe, recipe_from_dict
from frameloom.config.loading.schema_tree import RENAMED, field_at
from frameloom.core.errors import ConfigError

OLD = "train: {steps: 100, halve: false}\nobjective: {law: mode, strata: 8}\n"
NEW = "train: {steps: 100, oom_split: false}\nobjective: {distribution: mode, stratified_levels: 8}\n"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("frameloom"), "propagate", True)
    return caplog


def test_every_old_name_has_a_key_of_today_in_the_same_section() -> None:
    for old, new in RENAMED.items():
        assert field_at(tuple(new.split("."))) is not None and field_at(tuple(old.split("."))) is None
        assert old.rpartition(".")[0] == new.rpartition(".")[0]


def test_a_file_with_old_names_gives_the_same_recipe_and_warns(recipe_file: Path, warnings) -> None:
    text = recipe_file.read_text().partition("train:")[0]
    recipe_file.write_text(text + NEW)
    wanted = load_recipe(recipe_file)
    assert not warnings.messages
    recipe_file.write_text(text + OLD)
    assert load_recipe(recipe_file) == wanted
    assert f"{recipe_file}:12: train.halve is called train.oom_split now" in warnings.text
    assert len(warnings.messages) == 3


def test_old_names_work_on_the_command_line_and_win_over_the_file(recipe_file: Path, warnings) -> None:
    words = ["--train.halve", "false", "--data.cache", "{foreign: open_sora_plan, foreign_folders: [a]}"]
    recipe = load_recipe(recipe_file, words)
    assert recipe == load_recipe(
        recipe_file,
        ["--train.oom_split", "false", "--data.cache", "{external: open_sora_plan, external_folders: [a]}"],
    )
    assert "--train.halve: train.halve is called train.oom_split now" in warnings.text
    with pytest.raises(ConfigError, match=r"--data.alike: data.cost_group is 0"):
        load_recipe(recipe_file, ["--data.alike", "0"])


def test_stored_recipes_with_all_keys_load_without_a_word(recipe_file: Path, warnings) -> None:
    value = load_recipe(recipe_file).model_dump(mode="json")
    today = recipe_from_dict(value)
    for old, new in RENAMED.items():
        section = value
        for part in old.split(".")[:-1]:
            section = section.get(part) if section else None
        if section:
            section[old.rpartition(".")[2]] = section.pop(new.rpartition(".")[2])
    assert recipe_from_dict(value) == today and not warnings.messages


def test_both_names_at_once_are_refused(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text() + "  halve: true\n  oom_split: true\n")
    with pytest.raises(ConfigError, match=r"train.halve is the old name of train.oom_split, which is set too"):
        load_recipe(recipe_file)
