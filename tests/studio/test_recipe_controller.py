"""The place Recipe says what `frameloom recipe check` says, and writes new files only."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from frameloom.cli.main import main
from frameloom.config.loading.yaml_values import parse_document
from frameloom.core.errors import ConfigError
from frameloom.studio.recipe.controller import RecipeController, describe_check
from frameloom.studio.recipe.files import find_recipe_file, list_recipes, set_key
from frameloom.studio.recipe.form import build_fields, sizes_for
from frameloom.studio.server.context import Limits, StudioContext

BAD = "_base_: shapes/demo\nname: bad\noptim: {learning_rate: 1}\ntrain: {steps: many}\nsample: {frames: 8}\n"


@pytest.fixture
def controller(tmp_path, monkeypatch):
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    root.mkdir()
    scratch.mkdir()
    monkeypatch.chdir(root)
    return RecipeController(StudioContext(root.resolve(), scratch))


def test_the_messages_are_those_of_the_command(controller, capsys):
    (controller.context.root / "bad.yaml").write_text(BAD)
    with pytest.raises(SystemExit) as left:
        main(["recipe", "check", "bad.yaml"])
    assert left.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()
    found = controller.check(BAD, "bad.yaml")
    assert found.problems == told and len(told) >= 2
    assert "learning_rate" in describe_check(found) and f"{len(told)} problems" in describe_check(found)


def test_a_recipe_without_mistakes_names_what_is_not_there_yet(controller):
    text, name = controller.open("shipped: shapes/demo")
    found = controller.check(text, name)
    assert name == "demo.yaml" and not found.problems
    assert any("data.manifest" in missing for missing in found.missing)
    assert "The recipe is valid" in describe_check(found)


def test_text_that_is_no_yaml_is_told_and_the_form_is_left_alone(controller):
    found = controller.check("optim: {lr: 1", "x.yaml")
    assert "not valid YAML" in found.problems[0] and found.values is None
    assert controller.check("x" * (Limits().text_chars + 1), "x.yaml").problems


def test_the_form_shows_what_is_inherited_and_what_is_set(controller):
    found = controller.check("_base_: shapes/demo\nname: x\ntrain: {steps: 7}\nmodel: {family: latte}\n", "x.yaml")
    assert found.values is not None
    assert found.values[("train", "steps")] == 7 and found.values[("optim", "lr")] == 3e-3
    assert found.values[("lora", "rank")] is None
    size = next(field for field in controller.fields["model"] if field.path[-1] == "size")
    assert "tiny" in (sizes_for(size, found.values) or [])


@pytest.mark.parametrize("base", ["../outside.yaml", "{folder}/outside.yaml", "linked.yaml"])
def test_a_base_outside_the_folder_is_not_read(controller, tmp_path, base):
    (tmp_path / "outside.yaml").write_text("name: secret-7d1f\nunknown_key: secret-7d1f\n")
    (controller.context.root / "linked.yaml").symlink_to(tmp_path / "outside.yaml")
    found = controller.check(f"_base_: {base.format(folder=tmp_path)}\n", "x.yaml")
    assert "lies outside" in found.problems[0] and "secret-7d1f" not in str(found)


def test_a_base_beside_the_file_is_read(controller):
    """The control."""
    (controller.context.root / "sub").mkdir()
    (controller.context.root / "sub" / "base.yaml").write_text("_base_: shapes/demo\nname: inherited\n")
    found = controller.check("_base_: base.yaml\n", "sub/x.yaml")
    assert not found.problems and found.values is not None and found.values[("name",)] == "inherited"


def test_a_field_that_says_what_is_inherited_writes_nothing(controller):
    text, name = controller.open("shipped: shapes/demo")
    assert controller.set_field(text, name, ("optim", "lr"), 3e-3) is None
    assert controller.set_field(text, name, ("optim", "lr"), 5e-3) == f"{text}optim:\n  lr: 0.005\n"


def test_saving_writes_a_new_file_once(controller):
    text, name = controller.open("shipped: shapes/demo")
    assert controller.save(text, name) == "demo.yaml"
    assert (controller.context.root / "demo.yaml").read_text() == text
    with pytest.raises(ConfigError, match=r"never overwritten; e\.g\. demo-2"):
        controller.save(text, name)
    assert list_recipes(controller.context)[0] == "demo.yaml"
    assert find_recipe_file(controller.context, "demo.yaml") == controller.context.root / "demo.yaml"


@pytest.mark.parametrize("name", ["../x.yaml", "/tmp/x.yaml", ".x.yaml", "sub/../../x.yaml", ""])
def test_nothing_is_saved_elsewhere_or_with_mistakes(controller, name):
    text, _ = controller.open("shipped: shapes/demo")
    with pytest.raises(Exception, match=r"outside|leaves|absolute|hidden|no name"):
        controller.save(text, name)
    with pytest.raises(ConfigError, match="not saved"):
        controller.save(BAD, "bad.yaml")
    assert list(controller.context.root.iterdir()) == []


@pytest.mark.parametrize("name", ["shipped: ../../secret", "shipped: nothing", "../x.yaml", "notes.txt"])
def test_only_listed_recipes_are_opened(controller, name):
    with pytest.raises(Exception, match=r"no shipped|leaves|no such"):
        controller.open(name)


TEXT = """\
# Mine
_base_: shapes/demo
name: first  # the name
optim:
  # slow and steady
  lr: 1.0e-3    # was 2.0e-3
train: {steps: 10, save_every: 5}
data:
    buckets:
        64px: {1: [1.0, 4]}
sample:
"""


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("name",), "other", "name: other  # the name"),
        (("optim", "lr"), 5e-4, "  lr: 5e-4    # was 2.0e-3"),
        (("optim", "weight_decay"), 0.1, "  weight_decay: 0.1"),
        (("train", "steps"), 20, "train: {steps: 20, save_every: 5}"),
        (("train", "keep"), 3, "train: {steps: 10, save_every: 5, keep: 3}"),
        (("data", "flip"), 0.5, "    flip: 0.5"),
        (("model", "size"), "tiny", "  size: tiny"),
        (("seed",), 7, "seed: 7"),
        (("sample", "steps"), 4, "  steps: 4"),
    ],
)
def test_one_line_changes_and_the_rest_stays(path, value, line):
    changed = set_key(TEXT, path, value, where="recipe")
    rows, before = changed.splitlines(), TEXT.splitlines()
    assert line in rows
    lost = [row for row in before if row not in rows]
    assert len(lost) <= 1 and len(rows) - len(before) <= 2
    tree = parse_document(changed, where="recipe")[0]
    for name in path:
        tree = tree[name]
    assert tree == value


def test_a_value_that_is_there_already_leaves_the_text_alone():
    assert set_key(TEXT, ("train", "steps"), 10, where="recipe") == TEXT


def test_what_fits_nowhere_is_written_anew():
    text = "train: {steps: 10,\n  save_every: 5}\n"
    changed = set_key(text, ("train", "keep"), 2, where="recipe")
    assert parse_document(changed, where="recipe")[0] == {"train": {"steps": 10, "save_every": 5, "keep": 2}}


def test_text_that_cannot_be_read_is_not_touched():
    with pytest.raises(ConfigError, match="not valid YAML"):
        set_key("a: [1", ("name",), "x", where="recipe")


@settings(max_examples=60, deadline=None)
@given(
    path=some.sampled_from([("name",), ("optim", "lr"), ("train", "steps"), ("new", "key"), ("sample", "steps")]),
    value=some.one_of(some.none(), some.booleans(), some.integers(-99, 99), some.text(max_size=12), some.floats(0, 1)),
)
def test_any_value_reads_back_and_no_other_key_changes(path, value):
    tree = parse_document(set_key(TEXT, path, value, where="recipe"), where="recipe")[0]
    before = parse_document(TEXT, where="recipe")[0]
    inner = tree
    for name in path:
        inner = inner[name]
    assert inner == value
    assert {key: tree[key] for key in before if key != path[0]} == {
        key: before[key] for key in before if key != path[0]
    }


def test_every_field_shows_its_default_and_reads_it_back():
    fields = [field for group in build_fields().values() for field in group]
    assert len(fields) > 35 and all(field.info for field in fields)
    for field in fields:
        assert field.read(field.show(field.default)) == field.default, field.path
