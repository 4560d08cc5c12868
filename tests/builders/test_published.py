"""A published pipeline folder, written by diffusers and transformers, as the start of a run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from frameloom.builders.denoiser import build_denoiser
from frameloom.builders.text import build_text
from frameloom.builders.vae import build_vae
from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import CheckpointError
from frameloom.core.random import stream
from frameloom.training.train import train
from tests.models.text import tiny

TRANSFORMER = {
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "text_embed_dim": 16,
    "time_embed_dim": 16,
    "sample_height": 8,
    "sample_width": 8,
    "sample_frames": 9,
    "max_text_seq_length": 12,
    "use_rotary_positional_embeddings": True,
}
VAE = {
    "block_out_channels": (8, 8, 8, 8),
    "down_block_types": ("CogVideoXDownBlock3D",) * 4,
    "up_block_types": ("CogVideoXUpBlock3D",) * 4,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 2,
}


def draw(model: torch.nn.Module) -> torch.nn.Module:
    generator = stream(0, "published pipeline")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel

    folder = tmp_path_factory.mktemp("CogVideoX")
    with torch.random.fork_rng(devices=[]):
        draw(CogVideoXTransformer3DModel(**TRANSFORMER)).save_pretrained(
            folder / "transformer", max_shard_size="100KB", safe_serialization=True
        )
        draw(AutoencoderKLCogVideoX(**VAE)).save_pretrained(folder / "vae", safe_serialization=True)
    (folder / "model_index.json").write_text('{"_class_name": "CogVideoXPipeline"}')
    tiny.make_t5(folder / "text")
    return folder


def write_recipe(world, pipeline: Path, **changes: object) -> Path:
    overrides = {
        **{"num_attention_heads": 2, "num_layers": 2, "attention_head_dim": 64, "time_embed_dim": 16},
        **{"sample_height": 8, "sample_width": 8, "sample_frames": 9, "max_text_seq_length": 12},
        **{"use_rotary_positional_embeddings": True, "attention_bias": True},
        **changes,
    }
    return world.write_recipe(
        model={
            "_delete_": True,
            "family": "cogvideox_fun",
            "size": "2b",
            "overrides": overrides,
            "weights": str(pipeline),
        },
        vae={
            "_delete_": True,
            "name": "cogvideox",
            "size": "2b",
            "overrides": {
                "block_channels": [8, 8, 8, 8],
                "latent_channels": 4,
                "layers_per_block": 1,
                "norm_groups": 2,
            },
            "weights": str(pipeline),
        },
        text={"encoders": [{"name": "t5", "path": str(pipeline / "text"), "max_length": 12, "precision": "fp32"}]},
        objective={"kind": "v"},
        data={"buckets": {"_delete_": True, "64px": {"9": [1.0, 2]}}},
        train={"steps": 2, "precision": "bf16"},
    )


def test_its_parts_are_found_and_trained_from(world, pipeline: Path) -> None:
    recipe = load_recipe(write_recipe(world, pipeline))
    vae = build_vae(recipe.vae, seed=0)
    text = build_text(recipe.text, recipe.model)
    ours = build_denoiser(recipe.model, latent_channels=4, text=text, seed=0).model.state_dict()
    shards = sorted((pipeline / "transformer").glob("*.safetensors"))
    assert len(shards) > 1 and vae.model.latent_channels == 4
    from safetensors.torch import load_file

    theirs = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items() if name in ours)
    run = train(recipe)
    assert (run / "export" / "model.safetensors").is_file()


def test_a_setting_that_leaves_no_trace_in_the_weights_is_told(
    world, pipeline: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(write_recipe(world, pipeline, sample_height=16))
    with caplog.at_level(logging.WARNING):
        build_denoiser(recipe.model, latent_channels=4, text=build_text(recipe.text, recipe.model), seed=0)
    assert "sample_height 8 there, 16 here" in caplog.text


def test_another_depth_is_refused_with_a_list(world, pipeline: Path) -> None:
    recipe = load_recipe(write_recipe(world, pipeline, num_layers=3))
    with pytest.raises(CheckpointError, match=r"missing \(transformer_blocks\.2\."):
        build_denoiser(recipe.model, latent_channels=4, text=build_text(recipe.text, recipe.model), seed=0)
