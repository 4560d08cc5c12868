"""A training step of our loop against the plainest PyTorch loop on the same model and the same batches.

Ours reads the batch from the caches, draws keyed noise, clips, averages the weights and logs; the plain loop has its
tensors at hand and does forward, loss, backward and AdamW.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.bench.harness import Effort, Row, Times, Work, attempt, compare_times, take_turns
from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.config.load import load_recipe
from frameloom.config.schema import Recipe
from frameloom.data.shapes_set import write_shapes
from frameloom.generate.parts import build_vae
from frameloom.train.build import build_trainer
from frameloom.train.caching import write_caches
from frameloom.train.denoiser import DenoiserTask
from frameloom.train.loop import Trainer
from frameloom.train.run_folder import RunFolder

_BUILDS = 4
"""trainers built one after the other: where tensors happen to lie in memory alone moves a step by a percent"""
_FEWER = 5
"""times fewer rounds of a larger model"""


# The same blocks, four times as wide: about 30 million parameters.
_LARGE = ("--model.overrides", "{depth: 3, depth_single_blocks: 0, hidden_size: 512, num_heads: 16}")


def measure(effort: Effort) -> Iterator[Row]:
    """Both loops in turn on batches of 32, with the demo's denoiser and with a larger one."""
    yield from attempt("step", "our loop, demo denoiser", _measure_loop, "demo denoiser", (), effort.rounds, effort)
    if not effort.is_quick:
        rounds = -(-effort.rounds // _FEWER)
        yield from attempt("step", "our loop, 30M", _measure_loop, "30M", _LARGE, rounds, effort)


def _measure_loop(name: str, changes: Sequence[str], all_rounds: int, effort: Effort) -> Row:
    warmup, builds = effort.pick(6, 1), effort.pick(_BUILDS, 1)
    rounds = -(-all_rounds // builds)
    with tempfile.TemporaryDirectory() as folder:
        recipe = prepare_demo(Path(folder), warmup + rounds, num_clips=effort.pick(160, 40), changes=changes)
        found = [_measure_build(recipe, Path(folder), rounds, warmup) for _ in range(builds)]
    ours, other = (Times.join([times[name] for times in found]) for name in ("ours", "other"))
    row = compare_times("step", f"our loop, {name}", ours, other, against="a bare loop")
    assert row.ratio is not None
    return replace(row, note=f"our loop costs {1 / row.ratio - 1:+.1%}")


def _measure_build(recipe: Recipe, folder: Path, rounds: int, warmup: int) -> dict[str, Times]:
    with ExitStack() as stack:
        trainer = open_trainer(recipe, folder, stack)
        return take_turns({"ours": our_step(trainer), "other": plain_step(trainer)}, rounds, warmup=warmup)


def open_trainer(recipe: Recipe, folder: Path, stack: ExitStack) -> Trainer:
    """A trainer at its first step; `stack` closes its trackers."""
    trainer = build_trainer(recipe, RunFolder(folder / recipe.name), first_step=1)
    for tracker in trainer.trackers:
        stack.callback(tracker.close)
    return trainer


def prepare_demo(folder: Path, steps: int, num_clips: int = 160, changes: Sequence[str] = ()) -> Recipe:
    """A small set, a fresh autoencoder and both caches, as a run would have them; `changes` are overrides."""
    write_shapes(folder / "data", count=num_clips, seed=0, image_share=0.0)
    recipe = load_recipe(
        "shapes/demo",
        [
            *("--data.manifest", "null", "--run.folder", str(folder)),
            # Epochs as long as the demo's, without as many clips to write and to encode.
            *("--data.sources", f"[{{path: {folder / 'data' / 'manifest.parquet'}, repeat: 12}}]"),
            *("--name", "run", "--vae.weights", str(folder / "vae")),
            *("--data.cache.latents", str(folder / "latents"), "--data.cache.text", str(folder / "text")),
            *("--train.steps", str(steps), "--optim.schedule.warmup_steps", "0", "--data.drop_last", "true"),
            *("--data.buckets", "{64px: {9: [1.0, 32]}}", "--validation", "null"),
            *changes,
        ],
    )
    vae = build_vae(recipe.vae.model_copy(update={"weights": None}), seed=0)
    write_model_folder(
        folder / "vae", kind="vae", name=vae.name, config=asdict(vae.config), tensors=vae.model.state_dict()
    )
    (folder / "run").mkdir()
    list(write_caches(recipe))
    return recipe


def our_step(trainer: Trainer) -> Work:
    steps = trainer.feed.steps(0, 0, trainer.recipe.train.accumulate)

    def step() -> None:
        batches, position = next(steps)
        result = trainer.take_step(batches)
        trainer.epoch, trainer.position = position
        trainer.note(result)
        if trainer.step % trainer.recipe.train.log_every == 0:
            trainer.log({**result.values, **trainer.rates()})

    return step


def plain_step(trainer: Trainer) -> Work:
    task = trainer.built.task
    assert isinstance(task, DenoiserTask)
    model, family = task.model, task.denoiser.family
    batches, _ = next(trainer.feed.steps(0, 0, 1))
    batch = batches[0]
    assert batch.latents is not None
    latent: Tensor = task.vae.normalize(batch.latents[0])
    text = task.text.encode(batch.captions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        noise, time_B = torch.randn_like(latent), torch.rand(len(latent))
        mix = time_B[:, None, None, None, None]
        prediction = family.denoise(model, (1 - mix) * latent + mix * noise, time_B, text)
        torch.autograd.backward(F.mse_loss(prediction, noise - latent))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
