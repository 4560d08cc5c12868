"""A small real world for the loop: clips on disk, an exported autoencoder, and recipes that train in a second."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import pytest
import yaml

from frameloom.builders.vae import build_vae
from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.core.device import ISA_LIMIT
from frameloom.demo.shapes_set import write_shapes
from tests.faults.injection import install
from tests.faults.table import pytest_terminal_summary as pytest_terminal_summary

# Convolutions round as the instructions that they use: all machines, and the processes of tests, take the same ones.
os.environ.setdefault(ISA_LIMIT, "AVX2")
# Faults that a test asks for strike in its own process, too.
install()

VAE = {"base_channels": 8, "latent_channels": 4, "encoder_flow_channels": 8, "decoder_flow_channels": 8}
MODEL = {"hidden_size": 32, "num_heads": 2, "depth": 1, "depth_single_blocks": 1, "axes_dim": [4, 6, 6]}


@dataclasses.dataclass(frozen=True)
class World:
    """Folder of the shared files, and how to get a recipe for them."""

    shared: Path
    folder: Path

    def write_recipe(self, task: str = "denoiser", **sections: object) -> Path:
        """A recipe file for this test's own folder; `sections` are merged over the defaults."""
        values: dict[str, object] = {
            "name": "run",
            "task": task,
            "run": {"folder": str(self.folder), "trackers": ["jsonl"]},
            "model": {"overrides": MODEL},
            "vae": {"overrides": VAE} if task == "autoencoder" else {"weights": str(self.shared / "vae")},
            "data": {
                "manifest": str(self.shared / "data" / "manifest.parquet"),
                "where": {"split": "train"},
                "buckets": {"64px": {"1": [1.0, 4], "9": [1.0, 4]}},
                "workers": 0,
            },
            "optim": {"lr": 1e-3},
            "train": {"steps": 6, "save_every": 2, "log_every": 1},
        }
        base = self.folder / "base.yaml"
        base.write_text(yaml.safe_dump(values))
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump({"_base_": "base.yaml", **sections}))
        return path

    def recipe(self, *overrides: str, task: str = "denoiser", **sections: object) -> Recipe:
        return load_recipe(self.write_recipe(task, **sections), overrides)


# Their processes work for all tests of a file or folder, on all cores. They come first and together, so that one test
# process has them all and the other does not wait for it.
LONGEST = ("distributed", "models/denoisers/test_sequence.py", "sampling/test_sequence_sampling.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest = [Path(__file__).parent / name for name in LONGEST]
    items.sort(key=lambda item: not any(item.path.is_relative_to(path) for path in longest))


@pytest.fixture(autouse=True)
def plain_logging() -> None:
    """A command that ran in this process before has sent our messages elsewhere; tests read them from the root."""
    logger = logging.getLogger("frameloom")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_shapes(folder / "data", count=40, seed=3, num_workers=1)
    world = World(folder, folder)
    vae = build_vae(world.recipe(task="autoencoder").vae, seed=0)
    config = dataclasses.asdict(vae.config)
    write_model_folder(folder / "vae", kind="vae", name=vae.name, config=config, tensors=vae.model.state_dict())
    return folder


@pytest.fixture
def world(shared_world: Path, tmp_path: Path) -> World:
    return World(shared_world, tmp_path)
