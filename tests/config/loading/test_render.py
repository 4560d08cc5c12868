from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import frameloom
from frameloom.config.loading.recipe import load_recipe, resolve
from frameloom.config.loading.render import json_schema, render_reference, render_yaml
from frameloom.config.loading.schema_tree import walk
from frameloom.config.schema.recipe import Recipe

Writer = Callable[[str, str], Path]

VARIANTS = {
    "plain": [],
    "nulls": ["--train.ema", "null", "--optim.clip_norm", "null"],
    "own mappings": [
        "--model.overrides",
        "{depth: 4, mlp_ratio: 1e-1, axes_dim: [8, 12, 12], init: zero}",
        "--vae.overrides",
        "{}",
    ],
    "encoders": ["--text.encoders", "[{name: minilm}, {name: minilm, path: other, max_length: 7}]"],
    "odd text": ["--run.folder", 'a "b": #c\\ 語', "--data.where", "{split: 'yes', '9': '1e-5', n: 3, on: true}"],
    "validation": ["--validation", "{where: {split: val}, every: 7}"],
    "odd bucket": ['--data.buckets."256px_ar2.39:1".5', "[[0.1, 1e-5], 4]"],
    "v": ["--objective", "{kind: v, min_snr_gamma: 5, betas: linear}"],
    "shift": ["--objective.shift", "open_sora2"],
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_printed_recipe_reads_back_equal(recipe_file: Path, write: Writer, overrides: list[str]) -> None:
    recipe = load_recipe(recipe_file, overrides)
    again = load_recipe(write("again.yaml", render_yaml(recipe)))
    assert again == recipe
    assert again.model_dump() == recipe.model_dump()
    assert load_recipe(recipe_file, [*overrides, "--seed", "43"]) != again


def test_printed_recipe_holds_every_key_with_its_meaning(recipe_file: Path, write: Writer) -> None:
    recipe = load_recipe(recipe_file, VARIANTS["validation"])
    text = render_yaml(recipe)
    value = resolve(write("again.yaml", text))
    for key in walk():
        inner = value
        for part in key.path:
            if inner in (None, [], False):  # a section that is not set
                break
            if key.path[0] == "objective" and part not in inner:  # a key of another kind
                break
            inner = inner[int(part)] if isinstance(inner, list) else inner[part]
        else:
            assert f"# {key.field.description}" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_printing_keeps_the_order_of_the_schema(recipe_file: Path) -> None:
    text = render_yaml(load_recipe(recipe_file))
    assert re.findall(r"^(\w+):", text, flags=re.MULTILINE) == list(Recipe.model_fields)


def test_reference_has_a_row_for_every_key() -> None:
    text = render_reference()
    for key in walk():
        assert f"\n| `{key.path[-1]}` | " in text, key.dotted
        assert (key.field.description or "?").replace("<", "\\<") in text
    sections = {key.path for key in walk() if key.kind.fields}
    assert all(f"## `{'.'.join(path)}`\n" in text for path in sections)


def test_the_page_in_docs_is_up_to_date() -> None:
    page = Path(frameloom.__file__).parent.parent / "docs" / "recipe.md"
    assert page.read_text() == render_reference(), "run: frameloom recipe reference > docs/recipe.md"


def test_every_key_has_a_meaning() -> None:
    assert [key.dotted for key in walk() if not key.field.description] == []


def test_json_schema_knows_every_key_and_inheritance() -> None:
    schema = json.loads(json.dumps(json_schema()))
    assert set(schema["properties"]) == {*Recipe.model_fields, "_base_", "_delete_"}
    assert set(schema["$defs"]["OptimSection"]["properties"]) >= {"lr", "betas", "_delete_"}
    assert schema["additionalProperties"] is False
    assert "required" not in schema
