"""The Python API, as a script or a notebook uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import frameloom
from frameloom.core.errors import ConfigError, RunError
from tests.conftest import World


def run_python(code: str, cwd: Path) -> str:
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_recipes_are_read_without_torch(tmp_path: Path):
    code = (
        "import sys, frameloom\n"
        "assert all(callable(getattr(frameloom, name)) for name in ('load', 'train', 'load_recipe'))\n"
        "print(frameloom.load_recipe('shapes/demo', {'optim.lr': 1e-5}).optim.lr)\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert run_python(code, tmp_path) == "1e-05\n"


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'frameloom' has no attribute 'trian'"):
        frameloom.trian  # noqa: B018
    assert {"train", "load", "load_recipe", "Run", "Recipe"} <= set(dir(frameloom))


def test_a_recipe_is_a_file_a_dictionary_or_a_recipe(world: World):
    path = world.write_recipe()
    from_file = frameloom.load_recipe(path, {"train.steps": 2, "train.ema": None, "data.where": {"split": "heldout"}})
    assert (from_file.train.steps, from_file.train.ema, from_file.data.where) == (2, None, {"split": "heldout"})
    assert frameloom.load_recipe(from_file) == from_file
    assert frameloom.load_recipe({"_base_": "shapes/demo", "name": "mine"}).name == "mine"
    with pytest.raises(ConfigError, match=r"did you mean optim\.lr"):
        frameloom.load_recipe(from_file, {"optim.lrr": 1e-3})
    with pytest.raises(ConfigError, match=r"recipe: .*'nmae'; did you mean"):
        frameloom.load_recipe({"_base_": "shapes/demo", "nmae": "mine"})


def test_a_run_is_trained_and_its_metrics_are_a_table(world: World):
    run = frameloom.train(world.write_recipe(), {"train.steps": 3, "optim.lr": 1e-4})
    assert run.folder == world.folder / "run"
    assert run.metrics["step"].to_list() == [1, 2, 3]
    assert run.metrics["train/loss"].is_finite().all()
    assert (run.recipe.train.steps, run.recipe.optim.lr) == (3, 1e-4)
    resumed = frameloom.train(world.write_recipe(), {"train.steps": 4, "optim.lr": 1e-4})
    assert resumed.metrics["step"].to_list() == [1, 2, 3, 4]
    assert frameloom.Run(run.folder).metrics.equals(resumed.metrics)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match="not a run folder"):
        frameloom.Run(tmp_path)


@pytest.mark.slow
def test_processes_are_started_from_python(world: World, capfd: pytest.CaptureFixture[str]):
    run = frameloom.train(world.write_recipe(), {"train.steps": 2, "train.device": "cpu"}, processes=2)
    assert run.metrics["step"].to_list() == [1, 2]
    with pytest.raises(RunError, match=r"the 2 processes ended with exit code 2:\n.*not a readable table"):
        frameloom.train(run.recipe, {"data.manifest": str(world.folder / "recipe.yaml"), "name": "other"}, processes=2)


def test_a_mistake_is_told_before_processes_start(world: World):
    with pytest.raises(ConfigError, match="does not exist"):
        frameloom.train(world.write_recipe(), {"data.manifest": "nowhere.parquet"}, processes=2)
