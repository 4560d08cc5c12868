"""The Python API, as a script or a notebook uses it."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import frameloom
from frameloom.core.errors import ConfigError, DataError, FrameloomError, RunError
from frameloom.sampling.outputs import read_about, read_frames
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


def test_a_model_samples_videos_that_are_saved_and_shown(world: World):
    model = frameloom.train(world.write_recipe(), {"train.steps": 1}).load(device="cpu", dtype="fp32")
    small = {"frames": 9, "height": 64, "width": 64, "steps": 2}
    video = model.sample("a red circle", seed=1, **small)
    assert (video.frames.shape, video.frames.dtype) == ((9, 64, 64, 3), np.uint8)
    assert (video.request.prompt, video.request.seed) == ("a red circle", 1)
    again = frameloom.load(world.folder / "run", {"sample.steps": 2}).sample(
        ["a red circle", "a blue square"], seed=1, frames=9, height=64, width=64
    )
    assert np.array_equal(again[0].frames, video.frames) and not np.array_equal(again[1].frames, video.frames)
    saved = video.save(world.folder / "circle.mp4")
    assert read_about(saved)["prompt"] == "a red circle" and read_frames(saved).shape == video.frames.shape
    assert video._repr_html_().startswith('<video src="data:video/mp4;base64,')
    with pytest.raises(DataError, match="the suffix names no format"):
        video.save(world.folder / "circle.txt")
    with pytest.raises(FrameloomError, match="did you mean 'frames'"):
        model.sample("a red circle", framse=9)


def test_an_export_is_loaded_alone(world: World, tmp_path: Path):
    run = frameloom.train(world.write_recipe(), {"train.steps": 1})
    model = frameloom.load(run.folder / "export")
    assert model.sample("x", frames=1, height=64, width=64, steps=1).frames.shape == (1, 64, 64, 3)
    with pytest.raises(RunError, match="no such run, model folder or recipe"):
        frameloom.load(tmp_path / "nowhere")


def test_a_run_is_trained_outside_the_main_thread(world: World):
    """Signal handlers belong to the main thread, and are the caller's again after a run."""
    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(frameloom.train, world.write_recipe(), {"train.steps": 1}).result()
    assert run.metrics["step"].to_list() == [1]
    frameloom.train(world.write_recipe(), {"train.steps": 2})
    assert signal.getsignal(signal.SIGINT) is before


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match="not a run folder"):
        _ = frameloom.Run(tmp_path).recipe
    with pytest.raises(RunError, match="neither a run folder"):
        frameloom.Run(tmp_path).load()


@pytest.mark.slow
def test_processes_are_started_from_python(world: World, capfd: pytest.CaptureFixture[str]):
    run = frameloom.train(world.write_recipe(), {"train.steps": 2, "train.device": "cpu"}, processes=2)
    assert run.metrics["step"].to_list() == [1, 2]
    with pytest.raises(RunError, match=r"the 2 processes ended with exit code 2:\n.*not a readable table"):
        frameloom.train(run.recipe, {"data.manifest": str(world.folder / "recipe.yaml"), "name": "other"}, processes=2)


def test_a_mistake_is_told_before_processes_start(world: World):
    with pytest.raises(ConfigError, match="does not exist"):
        frameloom.train(world.write_recipe(), {"data.manifest": "nowhere.parquet"}, processes=2)
