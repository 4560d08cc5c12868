"""Checkpoints and recipes of every released format load with the values they had, or say what this version reads.

`museum/` holds one of each, as it was written then. Nothing there is ever written again; a new format adds a folder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from frameloom.checkpoint.reader import load_checkpoint, read_state
from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import CheckpointError
from frameloom.core.files import digest_value

MUSEUM = Path(__file__).with_name("museum")
CHECKPOINTS = sorted(path.parent for path in MUSEUM.glob("checkpoint-*/state.json"))
RECIPES = sorted(MUSEUM.glob("recipe-*.yaml"))


def expected() -> dict[str, dict[str, torch.Tensor]]:
    """What every checkpoint of the museum holds."""
    weights = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 8
    return {
        "model": {"blocks.0.weight": weights, "bias": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)},
        "optimizer": {"blocks.0.weight.exp_avg": weights * 0.5, "blocks.0.weight.step": torch.tensor(7.0)},
    }


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)
def test_a_checkpoint_of_an_earlier_version_loads_equal(folder, tally):
    tally.inject()
    loaded = load_checkpoint(folder)
    assert loaded.step == 7 and (loaded.state["epoch"], loaded.state["position"]) == (1, 28)
    found = {
        group: {name: (value.dtype, value.tolist()) for name, value in named.items()}
        for group, named in loaded.tensors.items()
    }
    assert found == {
        group: {name: (value.dtype, value.tolist()) for name, value in named.items()}
        for group, named in expected().items()
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_of_an_earlier_version_is_read(path, tally):
    tally.inject()
    recipe = load_recipe(path, [])
    assert recipe.optim.lr == 3e-4 and recipe.train.steps == 123 and recipe.seed == 42


def test_the_museum_has_every_format():
    assert {read_state(folder)["format"] for folder in CHECKPOINTS} == {1, 2, 3}
    assert RECIPES


def test_a_format_of_the_future_is_refused_by_number(tmp_path, tally):
    """The control: a number that is not looked at would be read by the rules of another one."""
    folder = shutil.copytree(CHECKPOINTS[0], tmp_path / "step-00000007")
    state = json.loads((folder / "state.json").read_text())
    content = {**{key: value for key, value in state.items() if key != "seal"}, "format": 99}
    sealed = {**content, "seal": digest_value(content)}
    (folder / "state.json").write_text(json.dumps(sealed, indent=1, sort_keys=True) + "\n")
    tally.inject()
    with pytest.raises(CheckpointError, match=r"format 99, this version reads formats 1 to 3"):
        load_checkpoint(folder)
