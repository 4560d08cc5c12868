"""A run of the sdxl family whose every part comes out of one single file of Stability's layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from frameloom.builders.denoiser import build_denoiser
from frameloom.builders.text import build_text, open_text_file
from frameloom.builders.vae import build_vae
from frameloom.config.loading.recipe import load_recipe
from frameloom.config.rules.check import check_files
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.interop.convert.convert import Conversion, convert_weights
from frameloom.sampling.load import load_model
from frameloom.training.train import train
from tests.models.text.tiny import POSITIONS
from tests.sampling.sdxl_pipeline import OVERRIDES, make_pipeline


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pipeline(tmp_path_factory.mktemp("sdxl") / "pipeline")


@pytest.fixture(scope="module")
def single(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Far from any tokenizer."""
    out = tmp_path_factory.mktemp("single") / "sdxl.safetensors"
    convert_weights(Conversion(pipeline, out))
    return out


def write_recipe(world: Any, weights: Path, texts: Path, tokenizer: Path | None, **train_keys: object) -> Path:
    encoders = [
        {"name": name, "path": str(texts), "max_length": POSITIONS, "tokenizer": tokenizer and str(tokenizer)}
        for name in ("clip_l", "clip_bigg")
    ]
    return world.write_recipe(
        model={"_delete_": True, "family": "sdxl", "size": "tiny", "overrides": OVERRIDES, "weights": str(weights)},
        vae={"_delete_": True, "name": "kl", "size": "tiny", "weights": str(weights)},
        text={"encoders": encoders},
        objective={"kind": "epsilon"},
        data={"buckets": {"_delete_": True, "64px": {"1": [1.0, 2]}}},
        sample={"frames": 1, "height": 64, "width": 64, "steps": 2},
        train={"steps": 2, **train_keys},
    )


def test_every_part_is_that_of_the_folders(world: Any, pipeline: Path, single: Path) -> None:
    one = load_recipe(write_recipe(world, single, single, pipeline))
    other = load_recipe(write_recipe(world, pipeline, pipeline, None))
    built = []
    for recipe in (one, other):
        text = build_text(recipe.text, recipe.model)
        denoiser = build_denoiser(recipe.model, latent_channels=4, text=text, seed=0).model
        built.append((denoiser.state_dict(), build_vae(recipe.vae, seed=0).model.state_dict(), text))
    for ours, theirs in zip(built[0][:2], built[1][:2], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    states = [text.encode(["a red circle", "a star!", ""]) for _, _, text in built]
    assert torch.equal(states[0].tokens_BKD, states[1].tokens_BKD)
    assert torch.equal(states[0].pooled_BD, states[1].pooled_BD)
    assert not torch.equal(states[0].tokens_BKD[0], states[1].tokens_BKD[1])


def test_it_trains_resumes_and_samples(world: Any, pipeline: Path, single: Path) -> None:
    path = write_recipe(world, single, single, pipeline)
    run = train(load_recipe(path))
    whole = load_file(run / "export" / "model.safetensors")
    shutil.move(run, run.with_name("whole"))
    train(load_recipe(path, ["--train.steps", "1"]))
    assert train(load_recipe(path)) == run
    resumed = load_file(run / "export" / "model.safetensors")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    assert not torch.equal(
        resumed["conv_in.weight"], load_file(pipeline / "unet" / _weights(pipeline))["conv_in.weight"]
    )
    pictures = load_model(run).sample(["a red circle"] * 2)
    assert pictures[0].frames.shape == (1, 64, 64, 3)
    assert not np.array_equal(pictures[0].frames, pictures[1].frames)


def _weights(pipeline: Path) -> str:
    return next((pipeline / "unet").glob("*.safetensors")).name


def test_the_digest_is_of_this_encoder_alone(pipeline: Path, single: Path, tmp_path: Path) -> None:
    tensors = load_file(single)
    changed = {**tensors, "model.diffusion_model.out.2.bias": tensors["model.diffusion_model.out.2.bias"] + 1}
    save_file(changed, tmp_path / "unet.safetensors")
    key = "conditioner.embedders.0.transformer.text_model.final_layer_norm.bias"
    save_file({**tensors, key: tensors[key] + 1}, tmp_path / "text.safetensors")
    first, unet, text = (
        open_text_file(path, encoder="clip_l", tokenizer=str(pipeline)).digests()
        for path in (single, tmp_path / "unet.safetensors", tmp_path / "text.safetensors")
    )
    assert first == unet != text


def test_a_missing_tokenizer_is_told_before_anything_is_loaded(world: Any, single: Path) -> None:
    recipe = load_recipe(write_recipe(world, single, single, None))
    with pytest.raises(ConfigError, match=r"text\.encoders\.0\.tokenizer is null.*name the folder of the tokenizer"):
        check_files(recipe)
    with pytest.raises(CheckpointError, match="no tokenizer is in"):
        open_text_file(single, encoder="clip_l", tokenizer=str(single.parent))


def test_tokenizers_beside_the_file_are_found(pipeline: Path, single: Path, tmp_path: Path) -> None:
    shutil.copy(single, tmp_path / "sdxl.safetensors")
    for name in ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2"):
        shutil.copytree(pipeline / name, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
    found = open_text_file(tmp_path / "sdxl.safetensors", encoder="clip_bigg", tokenizer=None)
    assert found.tokenizer == tmp_path / "tokenizer_2"
    assert found.config["hidden_size"] == 24


def test_what_a_single_file_cannot_give_is_refused(world: Any, single: Path, pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not the published size.*config\.json"):
        open_text_file(single, encoder="clip_l", tokenizer=str(pipeline / "tokenizer"))
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="holds no text_encoder_2"):
        open_text_file(tmp_path / "other.safetensors", encoder="clip_bigg", tokenizer=str(pipeline))
    with pytest.raises(ConfigError, match="only clip_l and clip_bigg are parts of single files"):
        world.recipe(text={"encoders": [{"name": "t5", "path": str(single), "max_length": 12}]})
    with pytest.raises(ConfigError, match=r"tokenizer is set, but only clip_l"):
        world.recipe(text={"encoders": [{"name": "minilm", "tokenizer": str(pipeline)}]})
