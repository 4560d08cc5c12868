"""A control model of CogVideoX-Fun: trained on clips with control clips, resumed to the bit, sampled with --control."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import ConfigError
from frameloom.sampling.load import load_model
from frameloom.training.train import train

MODEL = {
    **{"num_attention_heads": 2, "num_layers": 1, "attention_head_dim": 16, "time_embed_dim": 16},
    **{"sample_height": 8, "sample_width": 8, "sample_frames": 9, "condition": "control"},
}


@pytest.fixture
def controlled(world: Any, tmp_path: Path) -> Path:
    """A recipe whose manifest has a control clip for each clip: the clip itself."""
    table = pl.read_parquet(world.shared / "data" / "manifest.parquet").filter(pl.col("kind") == "video")
    manifest = tmp_path / "control.parquet"
    table.with_columns(pl.col("path").alias("control")).write_parquet(manifest)
    return world.write_recipe(
        model={"_delete_": True, "family": "cogvideox_fun", "size": "tiny", "overrides": MODEL},
        objective={"kind": "v"},
        data={
            **{"manifest": str(manifest), "root": str(world.shared / "data"), "control": True},
            **{"where": {"_delete_": True}, "buckets": {"_delete_": True, "64px": {"9": [1.0, 2]}}},
        },
        sample={"frames": 9, "height": 64, "width": 64, "steps": 2, "guidance": 3.0, "fps": 24.0},
        train={"steps": 2, "save_every": 1},
    )


def long_clips(world: Any) -> list[str]:
    """Paths of the videos, the longest first."""
    table = pl.read_parquet(world.shared / "data" / "manifest.parquet").filter(pl.col("kind") == "video")
    return table.sort("frames", descending=True)["path"].to_list()


def test_it_trains_resumes_to_the_bit_and_samples(controlled: Path, world: Any) -> None:
    run = train(load_recipe(controlled))
    whole = load_file(run / "export" / "model.safetensors")
    shutil.move(run, run.with_name("whole"))
    train(load_recipe(controlled, ["--train.steps", "1"]))
    resumed = load_file(train(load_recipe(controlled)) / "export" / "model.safetensors")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    shutil.move(run, run.with_name("resumed"))
    other = load_file(train(load_recipe(controlled, ["--seed", "9"])) / "export" / "model.safetensors")
    assert any(not torch.equal(other[name], tensor) for name, tensor in whole.items())

    clips = [world.shared / "data" / path for path in long_clips(world)]
    sampler = load_model(run.with_name("whole"))
    prompt = "a red circle"
    first, again, changed = (sampler.sample(prompt, control=clip).frames for clip in (clips[0], clips[0], clips[1]))
    assert first.shape == (9, 64, 64, 3) and np.array_equal(first, again) and not np.array_equal(first, changed)
    with pytest.raises(ConfigError, match=r"needs a control clip.*--control"):
        sampler.sample(prompt)


def test_the_control_clip_reaches_the_model(controlled: Path, world: Any, tmp_path: Path) -> None:
    """The same clips with another control clip give other weights."""
    weights = []
    for name in ("own", "others"):
        if name == "others":
            table = pl.read_parquet(tmp_path / "control.parquet")
            control = pl.lit(long_clips(world)[0]).alias("control")
            table.with_columns(control).write_parquet(tmp_path / "control.parquet")
        run = train(load_recipe(controlled, ["--name", name]))
        weights.append((run / "export" / "model.safetensors").read_bytes())
    assert weights[0] != weights[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--data.control", "false"], "is a control model; set it to true"),
        (["--model.overrides.condition", "none"], ""),
        (["--data.cache.latents", "cache", "--data.frame_start", "first"], "a latent cache holds no control clips"),
        (["--model.family", "latte", "--model.overrides", "{}"], "latte has no control models"),
    ],
)
def test_what_is_missing_is_told_by_the_recipe_check(controlled: Path, overrides: list[str], message: str) -> None:
    if message:
        with pytest.raises(ConfigError, match=message):
            load_recipe(controlled, overrides)
        return
    with pytest.raises(ConfigError, match=r"data\.control is true, but this cogvideox_fun is no control model"):
        train(load_recipe(controlled, overrides))


def test_a_model_without_control_refuses_the_clip(controlled: Path, world: Any) -> None:
    plain = ["--data.control", "false", "--model.overrides.condition", "none", "--train.steps", "1"]
    sampler = load_model(train(load_recipe(controlled, plain)))
    clip = world.shared / "data" / long_clips(world)[0]
    with pytest.raises(ConfigError, match="takes no control clip"):
        sampler.sample("a red circle", control=clip)
