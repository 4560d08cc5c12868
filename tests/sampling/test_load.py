"""What can be sampled from: runs in any folder, exports, published folders; with adapters and in half precision."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.builders.lora import write_lora
from frameloom.builders.vae import build_vae
from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.core.errors import ConfigError, RunError
from frameloom.core.random import stream
from frameloom.diffusion.objectives import DDPMObjective
from frameloom.models.lora.adapters import Adapter, linear_layers
from frameloom.sampling.load import load_model
from frameloom.sampling.pipeline import Pipeline
from frameloom.training.train import train
from tests.builders.test_published import TRANSFORMER, VAE, draw
from tests.conftest import World
from tests.models.text import tiny
from tests.sampling.conftest import MODELS, Load, make_frames

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
    return sum(float(one.detach().double().sum()) for one in load_model(run, overrides).vae.parameters())


def test_parts_are_those_of_the_folder_that_the_run_was_started_in(
    projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = projects
    own, digest = sum_weights(Path("runs/run")), load_model(Path("runs/run")).origin["recipe"]
    monkeypatch.chdir(second)
    assert sum_weights(first / "runs" / "run") == sum_weights(Path("../first/runs/run")) == own
    assert load_model(first / "runs" / "run").origin["recipe"] == digest
    # What is said here leads from here.
    assert sum_weights(first / "runs" / "run", "--vae.weights", "parts/vae") != own
    monkeypatch.chdir(first.parent)
    assert sum_weights(Path("first/runs/run")) == own


def test_an_export_finds_them_too(projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = projects
    own = sum_weights(Path("runs/run"))
    monkeypatch.chdir(second)
    vae = load_model(first / "runs" / "run" / "export").vae
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


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_near(load: Load, model_folders: dict[str, Path], name: str) -> None:
    half = load_model(model_folders[name], ("--sample.precision", "bf16"))
    assert {parameter.dtype for parameter in half.denoiser.model.parameters()} == {torch.bfloat16}
    difference = np.abs(make_frames(load(name)).astype(int) - make_frames(half)).mean()
    assert 0 < difference < 4


def make_adapters(denoiser: LoadedDenoiser, seed: int) -> dict[str, Adapter]:
    generator, found = stream(seed, "adapters"), {}
    for name, layer in list(linear_layers(denoiser.model).items())[2:8]:
        down = torch.randn(2, layer.in_features, generator=generator)
        found[name] = Adapter(down, 0.1 * torch.randn(layer.out_features, 2, generator=generator), 3.0)
    return found


def test_several_loras_work_beside_the_weights_as_in_them(
    load: Load, model_folders: dict[str, Path], tmp_path: Path
) -> None:
    plain = load("latte")
    for seed in (1, 2):
        adapters, layers = make_adapters(plain.denoiser, seed), list(linear_layers(plain.denoiser.model))
        write_lora(tmp_path / str(seed), plain.denoiser, adapters, layers=layers, base={})

    def open_with(scales: tuple[float, float], *, merge: bool) -> Pipeline:
        chosen = [
            {"path": str(tmp_path / str(number)), "scale": scale} for number, scale in zip((1, 2), scales, strict=True)
        ]
        words = ("--sample.lora", json.dumps(chosen), "--sample.lora_merge", str(merge).lower())
        return load_model(model_folders["latte"], words)

    before = plain.denoiser.model.state_dict()
    found = {merge: open_with((0.7, 0.4), merge=merge) for merge in (True, False)}
    for merge, sampler in found.items():
        after = sampler.denoiser.model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before) != merge
        assert sampler.origin["weights"] != plain.origin["weights"]
    merged, beside = (make_frames(sampler).astype(int) for sampler in found.values())
    assert np.abs(merged - beside).max() <= 1
    assert np.abs(merged - make_frames(plain)).max() > 5
    assert np.abs(merged - make_frames(open_with((0.7, 0.1), merge=True))).max() > 1
    assert np.array_equal(make_frames(open_with((0.0, 0.0), merge=True)), make_frames(plain))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole published folder: transformer, autoencoder, text encoder, tokenizer, scheduler."""
    from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel

    folder = tmp_path_factory.mktemp("CogVideoX")
    with torch.random.fork_rng(devices=[]):
        draw(CogVideoXTransformer3DModel(**TRANSFORMER)).save_pretrained(folder / "transformer")
        draw(AutoencoderKLCogVideoX(**VAE)).save_pretrained(folder / "vae")
    tiny.make_t5(folder / "text_encoder")
    (folder / "scheduler").mkdir()
    content = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    settings = {**content, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(settings))
    return folder


def test_a_published_folder_says_its_family(pipeline: Path) -> None:
    sizes = ("--sample.frames", "9", "--sample.height", "32", "--sample.width", "48", "--sample.steps", "2")
    short = ("--text.encoders.0.max_length", "12")
    sampler = load_model(pipeline, (*sizes, *short))
    assert sampler.denoiser.config.num_layers == 2 and sampler.vae.latent_channels == 4
    assert isinstance(sampler.objective, DDPMObjective) and sampler.objective.step_to == "even"
    assert make_frames(sampler).shape == (9, 32, 48, 3)
    file = pipeline / "transformer" / "diffusion_pytorch_model.safetensors"
    others = ("--vae.weights", str(pipeline), "--text.encoders.0.path", str(pipeline))
    vae = (
        "--vae.overrides",
        json.dumps({"block_channels": [8] * 4, "latent_channels": 4, "layers_per_block": 1, "norm_groups": 2}),
    )
    alone = load_model(file, (*others, *vae, *sizes, *short), family="cogvideox_fun")
    assert all(
        torch.equal(one, two)
        for one, two in zip(alone.denoiser.model.parameters(), sampler.denoiser.model.parameters(), strict=True)
    )


def test_what_cannot_be_sampled_from_is_told(pipeline: Path, tmp_path: Path) -> None:
    unknown = tmp_path / "unknown"
    shutil.copytree(pipeline, unknown)
    (unknown / "transformer" / "config.json").write_text('{"_class_name": "OtherModel"}')
    with pytest.raises(RunError, match="add --family NAME"):
        load_model(unknown)
    with pytest.raises(RunError, match="no such run"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"family.*cogvideox_fun"):
        load_model(pipeline, family="cogvideox-fun")
    with pytest.raises(ConfigError, match="is of the family sdxl"):
        load_model(pipeline, family="latte", recipe="sdxl/finetune")
