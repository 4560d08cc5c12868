"""A key that is changed by the form changes that key in the text, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from frameloom.config.loading.yaml_values import parse_document
from frameloom.core.errors import ConfigError
from frameloom.studio.recipe.files import set_key
from frameloom.studio.recipe.form import build_fields

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
