"""Keys of sampling that depend on others, and those with several forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.sampling import LoraChoice
from frameloom.core.errors import ConfigError
from frameloom.diffusion.tables import SAMPLERS


@pytest.mark.parametrize(("kind", "wrong"), [("flow", "ddim"), ("v", "heun"), ("epsilon", "heun")])
def test_a_sampler_belongs_to_an_objective(recipe_file: Path, kind: str, wrong: str) -> None:
    words = ["--objective.kind", kind]
    with pytest.raises(ConfigError, match=rf"sample.sampler is {wrong}, which .* choose default, "):
        load_recipe(recipe_file, [*words, "--sample.sampler", wrong])
    for name in SAMPLERS[kind]:
        assert load_recipe(recipe_file, [*words, "--sample.sampler", name]).sample.sampler == name


def test_one_lora_is_a_path_and_several_are_a_list(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["--sample.lora", "a.safetensors"]).sample.lora == "a.safetensors"
    several = '[{"path": "a", "scale": 0.5}, {"path": "b"}]'
    found = load_recipe(recipe_file, ["--sample.lora", several]).sample.lora
    assert found == (LoraChoice(path="a", scale=0.5), LoraChoice(path="b"))
    with pytest.raises(ConfigError, match=r"sample\.lora"):
        load_recipe(recipe_file, ["--sample.lora", '[{"file": "a"}]'])


def test_several_loras_stand_in_a_recipe_file(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text() + "\nsample: {lora: [{path: a, scale: 0.5}, {path: b}]}\n")
    assert load_recipe(recipe_file).sample.lora == (LoraChoice(path="a", scale=0.5), LoraChoice(path="b"))
