"""A run is sampled from any folder, with the parts that it was trained beside."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from frameloom.builders.vae import build_vae
from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.sampling.load import Source, load_sampler, open_sampler
from frameloom.training.train import train
from tests.conftest import World

PARTS = {"run": {"folder": "runs", "trackers": ["jsonl"]}, "vae": {"weights": "parts/vae"}, "train": {"steps": 1}}


@pytest.fixture
def projects(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two folders with an autoencoder each under the same name, other weights in it; a run in the first."""
    places = (world.folder / "first", world.folder / "second")
    for seed, place in enumerate(places):
        vae = build_vae(world.recipe(task="autoencoder").vae, seed=seed)
        write_model_folder(
            place / "parts" / "vae",
            kind="vae",
            name=vae.name,
            config=dataclasses.asdict(vae.config),
            tensors=vae.model.state_dict(),
        )
    monkeypatch.chdir(places[0])
    train(world.recipe(**PARTS))
    return places


def sum_weights(run: Path, *overrides: str) -> float:
    return sum(float(one.detach().double().sum()) for one in load_sampler(run, overrides).vae.parameters())


def test_parts_are_those_of_the_folder_that_the_run_was_started_in(
    projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = projects
    own, digest = sum_weights(Path("runs/run")), load_sampler(Path("runs/run")).origin["recipe"]
    monkeypatch.chdir(second)
    assert sum_weights(first / "runs" / "run") == sum_weights(Path("../first/runs/run")) == own
    assert load_sampler(first / "runs" / "run").origin["recipe"] == digest
    # What is said here leads from here.
    assert sum_weights(first / "runs" / "run", "--vae.weights", "parts/vae") != own
    monkeypatch.chdir(first.parent)
    assert sum_weights(Path("first/runs/run")) == own


def test_an_export_finds_them_too(projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = projects
    own = sum_weights(Path("runs/run"))
    monkeypatch.chdir(second)
    vae = open_sampler(Source(first / "runs" / "run" / "export")).vae
    assert sum(float(one.detach().double().sum()) for one in vae.parameters()) == own


def test_paths_of_a_run_that_was_moved_lead_from_here(
    projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = projects
    own = sum_weights(Path("runs/run"))
    shutil.move(first / "runs" / "run", second / "kept")
    assert sum_weights(second / "kept") == own
    monkeypatch.chdir(second)
    assert sum_weights(Path("kept")) != own
