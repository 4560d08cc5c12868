"""Imported commands really train: each, shrunk to tiny sizes, learns, resumes exactly and samples."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml

from frameloom.checkpoint.reader import list_steps, read_state, step_folder
from frameloom.config.schema.recipe import Recipe
from frameloom.interop.importers.importer import import_command
from frameloom.sampling.batch import run_job
from frameloom.sampling.load import load_model
from frameloom.sampling.request import read_requests
from frameloom.training.caching import write_caches
from frameloom.training.train import train
from tests.recipes.twins import SIDE, Workshop
from tests.training.runs import losses

DOCUMENTS = Path(__file__).parents[1] / "interop" / "importers" / "documents"
STEPS = 8
RATES = {
    "cogvideox_fun-train.sh": 2e-4,
    "opensora_plan-stage1.sh": 2e-3,
    "latte-defaults.sh": 2e-3,
    "opensora2-buckets.py": 2e-3,
    "sdxl-configure.yaml": 2e-3,
    "opensora_plan-wfvae.sh": 2e-4,
}


@pytest.fixture(scope="session")
def workshop(shared_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(shared_world / "data" / "manifest.parquet", tmp_path_factory.mktemp("workshop"))


def make_twin(workshop: Workshop, folder: Path, name: str, *, rate: float, steps: int = STEPS) -> Recipe:
    """The imported recipe at tiny sizes, with a rate that shows in a few steps and formats that a CPU is quick at."""
    folder.mkdir(exist_ok=True)
    text = import_command(DOCUMENTS / name)
    (folder / "imported.yaml").write_text(text)
    here = {
        "_base_": "imported.yaml",
        "run": {"resume": "latest"},
        # One process, and clips too short to be shared by eight.
        "data": {"root": None, "sources": [], **({"grouped": {"sp_size": 1}} if "sp_size" in text else {})},
        "vae": {"precision": "fp32", "mini_batch": None},
        "optim": {"lr": rate, "schedule": {"_delete_": True}},
        "train": {"precision": "fp32", "loss_scale": None, "compile": False, "max_device_memory": None},
        "parallel": {"sequence": 1},
        **({"validation": {"where": {"split": "heldout"}, "levels": 2, "batches": 1}} if "validation:" in text else {}),
        "sample": {"steps": 2, "frames": 1, "height": SIDE, "width": SIDE, "guidance": 2.0},
    }
    (folder / "here.yaml").write_text(yaml.safe_dump(here))
    train_section = {"steps": steps, "epochs": None, "save_every": steps // 2, "keep": 9}
    return workshop.load_twin(str(folder / "here.yaml"), run_folder=folder, train=train_section)


def digests(run: Path) -> dict[str, str]:
    return dict(read_state(step_folder(run / "checkpoints", STEPS))["files"])


def resume_from_half(twin: Recipe, run: Path, folder: Path) -> Path:
    """The run as a kill right after half of the steps would have left it, gone on with."""
    target = folder / run.name
    shutil.copytree(run, target)
    shutil.rmtree(target / "export")
    for step in list_steps(target / "checkpoints"):
        if step > STEPS // 2:
            shutil.rmtree(step_folder(target / "checkpoints", step))
    return train(twin.model_copy(update={"run": twin.run.model_copy(update={"folder": str(folder)})}))


@pytest.mark.slow
@pytest.mark.parametrize("name", RATES)
def test_an_imported_command_learns_resumes_exactly_and_samples(workshop: Workshop, tmp_path: Path, name: str) -> None:
    twin = make_twin(workshop, tmp_path / "first", name, rate=RATES[name])
    run = train(twin)
    found = losses(run)
    # Clips, noise and noise levels of a step follow from the seed, so only the weights differ.
    still = losses(train(make_twin(workshop, tmp_path / "still", name, rate=1e-12)))
    assert len(found) == len(still) == STEPS and found[0] == still[0]
    assert sum(found[-4:]) < 0.98 * sum(still[-4:]), (found, still)
    again = resume_from_half(twin, run, tmp_path / "again")
    assert digests(again) == digests(run)
    assert losses(again) == found
    if twin.task == "denoiser":
        files = run_job(partial(load_model, run), read_requests(["a red circle"], None), tmp_path / "samples")
        assert len(files) == 1 and files[0].stat().st_size > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in DOCUMENTS.iterdir() if path.name not in RATES))
def test_other_printed_commands_train(workshop: Workshop, tmp_path: Path, name: str) -> None:
    twin = make_twin(workshop, tmp_path / "run", name, rate=1e-4, steps=2)
    if twin.data.cache.latents is not None:
        list(write_caches(twin))
    found = losses(train(twin))
    assert len(found) == 2 and all(math.isfinite(loss) and loss > 0 for loss in found)
