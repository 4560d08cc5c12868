"""Small models of all families to sample from: fresh weights whose zeros are shaken, as exported folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from frameloom.builders.denoiser import LoadedDenoiser, build_denoiser
from frameloom.builders.text import build_text
from frameloom.builders.vae import build_vae
from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.config.loading.recipe import load_recipe, resolve
from frameloom.config.schema.sampling import SampleSection
from frameloom.core.random import stream
from frameloom.data.media.writing import write_image, write_video
from frameloom.distributed.ranks import Ranks
from frameloom.sampling.batch import RankGroup
from frameloom.sampling.load import load_model
from frameloom.sampling.pipeline import Pipeline
from tests.conftest import World

DDPM = {"kind": "v"}
IMAGES = {"buckets": {"_delete_": True, "64px": {"1": [1.0, 4]}}}
SAMPLE = {"steps": 3, "guidance": 2.0, "height": 32, "width": 48, "frames": 9, "fps": 8}
MODELS: dict[str, dict[str, Any]] = {
    "sdxl": {
        "model": {"_delete_": True, "family": "sdxl"},
        "objective": {"kind": "epsilon"},
        "data": IMAGES,
        "sample": {**SAMPLE, "frames": 1},
    },
    "latte": {"model": {"_delete_": True, "family": "latte"}, "objective": DDPM},
    "opensora_plan": {
        "model": {"_delete_": True, "family": "opensora_plan", "size": "tiny-inpaint"},
        "objective": DDPM,
        "known": {"law": "frames"},
    },
    "cogvideox_fun": {
        "model": {"_delete_": True, "family": "cogvideox_fun", "overrides": {"condition": "inpaint"}},
        "objective": DDPM,
        "known": {"law": "regions"},
    },
    "opensora2": {"model": {"overrides": {"cond_embed": True}}, "known": {"law": "ends"}},
}
INPAINT = ("opensora_plan", "cogvideox_fun", "opensora2")
Load = Callable[..., Pipeline]


def write_shaken(denoiser: LoadedDenoiser, folder: Path) -> None:
    """A model folder with weights that are not zero anywhere."""
    generator = stream(1, "shake")
    with torch.no_grad():
        for parameter in denoiser.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    config = dataclasses.asdict(denoiser.config)
    write_model_folder(
        folder, kind="denoiser", name=denoiser.family.name, config=config, tensors=denoiser.model.state_dict()
    )


@pytest.fixture(scope="session")
def model_folders(shared_world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each family, with its recipe."""
    found = {}
    for name, sections in MODELS.items():
        root = tmp_path_factory.mktemp(name)
        file = World(shared_world, root).write_recipe(**{"sample": SAMPLE, **sections})
        recipe = load_recipe(file)
        vae, text = build_vae(recipe.vae, seed=0).model, build_text(recipe.text, recipe.model)
        denoiser = build_denoiser(recipe.model, latent_channels=vae.latent_channels, text=text, seed=1)
        folder = root / "model"
        write_shaken(denoiser, folder)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(resolve(file)))
        found[name] = folder
    return found


@pytest.fixture(scope="session")
def load(model_folders: dict[str, Path]) -> Load:
    """A model by family, loaded once, with settings of its own."""
    loaded: dict[str, Pipeline] = {}

    def load_one(name: str, **settings: Any) -> Pipeline:
        if name not in loaded:
            loaded[name] = load_model(model_folders[name])
        chosen = SampleSection.model_validate({**loaded[name].settings.model_dump(), **settings})
        return dataclasses.replace(loaded[name], settings=chosen)

    return load_one


@dataclasses.dataclass(frozen=True)
class Files:
    """A picture, another one, a clip of 24 frames, and masks: a square that is made anew, and the last frames."""

    picture: Path
    other: Path
    clip: Path
    square: Path
    ending: Path


def draw_scene(frame: int, size: tuple[int, int] = (32, 48)) -> np.ndarray:
    """A bright square that moves to the right over a dark slope."""
    height, width = size
    scene = np.zeros((height, width, 3), np.uint8)
    scene[..., 2] = np.linspace(20, 120, width, dtype=np.uint8)
    left = 4 + frame
    scene[10:22, left : left + 12] = (220, 200, 40)
    return scene


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("given")
    write_image(folder / "picture.png", draw_scene(0))
    write_image(folder / "other.png", draw_scene(16)[:, ::-1])
    write_video(folder / "clip.mp4", np.stack([draw_scene(frame) for frame in range(24)]), 8)
    square = np.zeros((32, 48, 3), np.uint8)
    square[8:24, 16:40] = 255
    write_image(folder / "square.png", square)
    ending = np.zeros((9, 32, 48, 3), np.uint8)
    ending[5:] = 255
    write_video(folder / "ending.mp4", ending, 8)
    return Files(*(folder / name for name in ("picture.png", "other.png", "clip.mp4", "square.png", "ending.mp4")))


ALONE = RankGroup(Ranks())
PROMPT = "a yellow square moves right"


def make_frames(pipeline: Pipeline, **fields: Any) -> np.ndarray:
    return pipeline.sample(PROMPT, seed=1, **fields).frames
