"""Number formats of a run: half-precision weights with full-precision copies, a half autoencoder, runs that repeat."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frameloom.checkpoint.reader import load_latest, read_state, step_folder
from frameloom.config.schema.optim import OptimSection
from frameloom.core.errors import CheckpointError
from frameloom.sampling.load import load_model
from frameloom.training.caching import write_caches
from frameloom.training.optim.optimizer import build_optimizer
from frameloom.training.optim.precision import MasterWeights
from frameloom.training.run.resuming import ResumeChoices
from frameloom.training.train import train
from tests.training.runs import losses

HALF = {"precision": "bf16", "weights_precision": "bf16"}
# Processors without instructions for it take fifty times as long for half precision.
DATA = {"frame_start": "first", "buckets": {"_delete_": True, "64px": {"1": [1.0, 1]}}}


def settings(**more: object) -> dict[str, object]:
    return {"steps": 4, "save_every": 2, "log_every": 1, **more}


def files(run: Path, step: int = 4) -> dict[str, str]:
    found: dict[str, str] = read_state(step_folder(run / "checkpoints", step))["files"]
    return found


def test_copies_keep_the_steps_that_half_precision_rounds_away() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    master = MasterWeights(dict(model.named_parameters()))
    optimizer = build_optimizer(master.params.items(), OptimSection(lr=1e-4, weight_decay=0.0))
    rounded = []
    for _ in range(40):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        master.take_gradients()
        optimizer.step()
        optimizer.zero_grad()
        master.write_back()
        rounded.append(model.weight[0, 0].item())
    # One step of 1e-4 is below half of bf16's spacing under 1 (2^-8 = 0.0039); twenty of them are not.
    assert rounded[0] == rounded[9] == 1.0 > rounded[-1]
    assert master.params["weight"][0, 0].item() == pytest.approx(1 - 40e-4, rel=1e-3)
    assert model.weight.grad is None


def test_gradients_of_micro_batches_are_added_in_full_precision() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    master = MasterWeights(dict(model.named_parameters()))
    for _ in range(300):
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        master.take_gradients()
    plain = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(300):
        plain += 1
    grad = master.params["weight"].grad
    assert grad is not None and grad.item() == 300 and plain.item() == 256


def test_half_weights_train_validate_and_resume_to_the_bit(world: Any) -> None:
    validation = {"every": 2, "where": {"split": "heldout"}, "batches": 1, "levels": 2}

    def run(name: str, **more: object) -> Path:
        recipe = world.recipe("--name", name, train=settings(**more), validation=validation, data=DATA)
        return train(recipe, ResumeChoices(accept_recipe_change=True))

    whole = run("whole", **HALF)
    run("parts", **{**HALF, "steps": 2})
    parts = run("parts", **HALF)
    assert files(parts) == files(whole) and losses(parts) == losses(whole)
    found = load_latest(whole / "checkpoints")
    assert found is not None
    dtypes = {tensor.dtype for tensor in found.tensors["model"].values()}
    assert dtypes == {torch.bfloat16, torch.float32}  # norms are float32
    for name, copy in found.tensors["master"].items():
        assert copy.dtype == torch.float32 and torch.equal(found.tensors["model"][name], copy.to(torch.bfloat16))
    full = run("full", precision="bf16")
    assert "master.safetensors" not in files(full)
    assert losses(whole) != losses(full) and losses(whole) == pytest.approx(losses(full), rel=0.05)
    assert load_model(whole, ["--sample.weights", "raw"]).denoiser.config is not None
    with pytest.raises(CheckpointError, match=r"train\.weights_precision was switched"):
        run("whole", precision="bf16", steps=6)


def test_adapters_stay_full_beside_half_weights(world: Any) -> None:
    run = train(world.recipe(train=settings(**HALF), lora={"rank": 2}, data=DATA))
    found = load_latest(run / "checkpoints")
    assert found is not None and "master" not in found.tensors
    assert {tensor.dtype for tensor in found.tensors["model"].values()} == {torch.float32}
    assert all(math.isfinite(loss) for loss in losses(run))


def test_a_half_autoencoder_encodes_the_same_from_a_cache(world: Any) -> None:
    cached = {**DATA, "cache": {"latents": str(world.folder / "latents")}}
    half = {"weights": str(world.shared / "vae"), "precision": "bf16"}
    recipe = world.recipe("--name", "cached", train=settings(), vae=half, data=cached)
    list(write_caches(recipe))
    kept = train(recipe)
    fresh = train(world.recipe("--name", "fresh", train=settings(), vae=half, data=DATA))
    full = train(world.recipe("--name", "full", train=settings(), data=DATA))
    assert losses(kept) == pytest.approx(losses(fresh), rel=1e-4)
    assert losses(fresh) != losses(full) and losses(fresh) == pytest.approx(losses(full), rel=0.05)


def test_bf16_resumes_to_the_bit_and_a_fixed_seed_gives_a_fixed_run(world: Any) -> None:
    fixed = {"precision": "bf16", "deterministic": True}
    whole = train(world.recipe("--name", "whole", train=settings(**fixed), data=DATA))
    train(world.recipe("--name", "parts", train=settings(**{**fixed, "steps": 2}), data=DATA))
    parts = train(world.recipe("--name", "parts", train=settings(**fixed), data=DATA))
    other = train(world.recipe("--name", "other", "--seed", "7", train=settings(**fixed), data=DATA))
    assert files(whole) == files(parts) and files(whole) != files(other)
    assert not torch.are_deterministic_algorithms_enabled()
