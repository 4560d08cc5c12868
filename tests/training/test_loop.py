"""What a run does besides resuming: learn, log, validate, refuse bad numbers, export."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from frameloom.checkpoint.model_folder import read_weights
from frameloom.checkpoint.reader import load_latest
from frameloom.core.errors import CacheError, CheckpointError, DataError
from frameloom.training.caching import write_caches
from frameloom.training.loop import Trainer
from frameloom.training.run.folder import RunFolder
from frameloom.training.run.resuming import ResumeChoices
from frameloom.training.train import build_trainer, train
from tests.conftest import VAE


def records(run: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def make_trainer(world, *overrides: str, **sections: object) -> Trainer:
    recipe = world.recipe(*overrides, **sections)
    folder = RunFolder(world.folder / "run")
    folder.path.mkdir(exist_ok=True)
    return build_trainer(recipe, folder, first_step=1)


def test_the_autoencoder_learns_and_its_export_normalises_latents(world):
    validation = {"every": 10, "where": {"split": "heldout"}, "batches": 2}
    run = train(world.recipe("--train.steps", "30", "--optim.lr", "2e-3", task="autoencoder", validation=validation))
    losses = records(run, "train/loss")
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    psnr = records(run, "validation/psnr_db")
    assert len(psnr) == 3 and psnr[-1] > psnr[0]
    exported = read_weights(run)
    assert exported.kind == "vae" and len(set(exported.config["scale"])) == 1
    assert exported.config["scale"][0] != 0.18215


def test_the_denoiser_learns_from_caches(world):
    cache = {"latents": str(world.folder / "latents"), "text": str(world.folder / "text")}
    data = {"frame_start": "first", "cache": cache}
    recipe = world.recipe("--train.steps", "60", "--optim.lr", "3e-3", data=data)
    assert len(list(write_caches(recipe))) == 2
    losses = records(train(recipe), "train/loss")
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_cached_and_fresh_encodings_train_the_same(world):
    data = {"frame_start": "first"}
    cached = {**data, "cache": {"latents": str(world.folder / "latents"), "text": str(world.folder / "text")}}
    recipe = world.recipe("--name", "cached", data=cached)
    list(write_caches(recipe))
    ours, theirs = train(recipe), train(world.recipe("--name", "fresh", data=data))
    assert records(ours, "train/loss") == pytest.approx(records(theirs, "train/loss"), rel=1e-4)


def test_a_stale_cache_is_refused_with_the_difference(world):
    cache = {"latents": str(world.folder / "latents")}
    list(write_caches(world.recipe(data={"frame_start": "first", "cache": cache})))
    with pytest.raises(CacheError, match="frame_start"):
        train(world.recipe(data={"frame_start": "center", "cache": cache}))


@pytest.mark.parametrize(
    "override", [("--train.precision", "bf16"), ("--objective.kind", "v"), ("--train.ema", "null")]
)
def test_other_settings_train_too(world, override):
    run = train(world.recipe(*override))
    assert all(math.isfinite(loss) for loss in records(run, "train/loss"))


@pytest.mark.parametrize("task", ["denoiser", "autoencoder"])
def test_recompute_changes_nothing_but_memory(world, task):
    plain = train(world.recipe("--name", "plain", task=task))
    saving = train(world.recipe("--name", "saving", "--train.recompute", "true", task=task))
    assert records(plain, "train/loss") == records(saving, "train/loss")


def poison(trainer: Trainer, value: float) -> None:
    """Make the next gradients of one weight `value`."""
    parameter = next(iter(trainer.task.model.parameters()))
    parameter.register_hook(lambda gradient: torch.full_like(gradient, value))


def test_tensorboard_gets_the_same_numbers(world):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(world.recipe(run={"trackers": ["jsonl", "tensorboard"]}))
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    written = [event.value for event in events.Scalars("train/loss")]
    assert written == pytest.approx(records(run, "train/loss"))


def test_a_slip_in_the_held_out_clips_is_told_before_the_first_step(world):
    with pytest.raises(DataError, match=r"validation.where: .*manifest.parquet: no row has split = 'held-out'"):
        train(world.recipe(validation={"every": 3, "where": {"split": "held-out"}}))
    assert not (world.folder / "run").exists()


def test_weights_of_a_folder_take_the_recipe_s_overrides_and_refuse_other_widths(world):
    start = train(world.recipe("--train.steps", "1"))
    words = ("--train.steps", "1", "--model.weights", str(start))
    theta = train(world.recipe("--name", "theta", *words, "--model.overrides.theta", "20000"))
    assert read_weights(theta).config == {**read_weights(start).config, "theta": 20000}
    with pytest.raises(CheckpointError, match=r"opensora2 checkpoint does not fit the model: \d+ missing"):
        train(world.recipe("--name", "deep", *words, "--model.overrides.depth", "9"))
    vae = world.recipe(task="autoencoder", vae={"overrides": {**VAE, "latent_channels": 6}}, name="narrow")
    narrow = train(vae.model_copy(update={"train": vae.train.model_copy(update={"steps": 1})}))
    with pytest.raises(CheckpointError, match=r"run: was made for another autoencoder.* in_channels \d+ \(here 24\)"):
        train(world.recipe("--name", "other", *words, "--vae.weights", str(narrow)))


def test_an_average_without_an_update_is_not_exported(world, caplog):
    run = train(world.recipe("--train.steps", "2", "--train.ema", "{every: 5}"))
    raw = load_latest(run / "checkpoints").tensors["model"]
    exported = read_weights(run).tensors
    assert all(torch.equal(exported[name], value) for name, value in raw.items())
    assert "train.ema.every is 5, and the run has 2 steps" in caplog.text


def test_a_refused_start_leaves_no_folder_and_no_other_recipe(world):
    with pytest.raises(DataError):
        train(world.recipe("--data.where.split", "nothing"))
    assert not (world.folder / "run").exists()
    run = train(world.recipe())
    saved = (run / "recipe.yaml").read_text()
    with pytest.raises(CheckpointError):
        train(world.recipe("--train.ema", "null"), ResumeChoices(accept_recipe_change=True))
    assert (run / "recipe.yaml").read_text() == saved
    assert load_latest(run / "checkpoints") is not None
