"""A training step of our loop against three others on the same model and the same batches.

Ours reads the batch from the caches, samples latents, draws keyed noise, drops captions, clips, averages the weights
and logs. The bare loop has its tensors at hand and does forward, loss, backward and AdamW. The second one also does
what the recipe asks of the mathematics, in plain PyTorch: it samples latents, clips and averages; so what ours takes
beyond it is the loop itself. The third one is that of diffusers' scripts, with accelerate, a schedule, diffusers'
average of the weights and the loss as a number. All three have their tensors at hand.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import (
    BenchSettings,
    Row,
    Times,
    Work,
    compare_times,
    load_baseline,
    measure_or_skip,
    take_turns,
)
from frameloom.builders.vae import build_vae
from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.demo.shapes_set import write_shapes
from frameloom.training.caching import write_caches
from frameloom.training.loop import Trainer
from frameloom.training.run.folder import RunFolder
from frameloom.training.tasks.denoiser import DenoiserTask
from frameloom.training.train import build_trainer

_BUILDS = 4
"""trainers built one after the other: where tensors happen to lie in memory alone moves a step by a percent"""
_BARE, _SAME = "a bare loop", "a bare loop that samples latents, clips and averages, too"
_SCRIPTS = "the loop of diffusers' scripts, with accelerate"
_LR = 1e-3
_FEWER = 5
"""times fewer rounds of a larger model"""


# The same blocks, four times as wide: about 30 million parameters.
_LARGE = ("--model.overrides", "{depth: 3, depth_single_blocks: 0, hidden_size: 512, num_heads: 16}")


def measure(bench: BenchSettings) -> Iterator[Row]:
    """All loops in turn on batches of 32, with the demo's denoiser and with a larger one."""
    yield from measure_or_skip(
        "step", "our loop, demo denoiser", _measure_loop, "demo denoiser", (), bench.rounds, bench
    )
    if not bench.is_quick:
        rounds = -(-bench.rounds // _FEWER)
        yield from measure_or_skip("step", "our loop, 30M", _measure_loop, "30M", _LARGE, rounds, bench)


def _measure_loop(name: str, changes: Sequence[str], all_rounds: int, bench: BenchSettings) -> Iterator[Row]:
    warmup, builds = bench.pick(6, 1), bench.pick(_BUILDS, 1)
    rounds = -(-all_rounds // builds)
    with tempfile.TemporaryDirectory() as folder:
        recipe = prepare_demo(Path(folder), warmup + rounds, num_clips=bench.pick(160, 40), changes=changes)
        found = [_measure_build(recipe, Path(folder), rounds, warmup) for _ in range(builds)]
    ours, *others = (Times.join([times[side] for times in found]) for side in found[0])
    for against, other in zip((_BARE, _SAME, _SCRIPTS), others, strict=False):
        row = compare_times("step", f"our loop, {name}", ours, other, against=against)
        assert row.ratio is not None
        yield replace(row, note=f"our loop costs {1 / row.ratio - 1:+.1%}")
    if len(others) == 2:
        load_baseline("accelerate")  # says what is missing


def _measure_build(recipe: Recipe, folder: Path, rounds: int, warmup: int) -> dict[str, Times]:
    with ExitStack() as stack:
        trainer = open_trainer(recipe, folder, stack)
        sides = {"ours": our_step(trainer), _BARE: plain_step(trainer), _SAME: equal_step(trainer)}
        if find_spec("accelerate") is not None:
            sides[_SCRIPTS] = script_step(trainer)
        return take_turns(sides, rounds, warmup=warmup)


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
        batches, planned = next(steps)
        result = trainer.take_step(batches)
        trainer.epoch, trainer.position = planned.position
        if trainer.step % trainer.recipe.train.log_every == 0:
            trainer.log({**result.values, **trainer.rates()})

    return step


@dataclass(frozen=True)
class AtHand:
    """A model, and a batch of which nothing has to be read."""

    model: nn.Module
    predict: Callable[[Tensor, Tensor], Tensor]
    mean_BCFHW: Tensor
    std_BCFHW: Tensor
    normalize: Callable[[Tensor], Tensor]

    @classmethod
    def take(cls, trainer: Trainer) -> AtHand:
        task = trainer.task
        assert isinstance(task, DenoiserTask)
        model = task.model
        batches, _ = next(trainer.feed.steps(0, 0, 1))
        batch = batches[0]
        assert batch.latents is not None
        text = task.text.encode(batch.captions)

        def predict(noisy_BCFHW: Tensor, time_B: Tensor) -> Tensor:
            return cast(Tensor, model(noisy_BCFHW, time_B, text.conditions()))

        return cls(model, predict, *batch.latents, task.vae.normalize)

    def loss(self, latent_BCFHW: Tensor) -> Tensor:
        """Flow matching with fresh noise at uniform times."""
        noise, time_B = torch.randn_like(latent_BCFHW), torch.rand(len(latent_BCFHW))
        mix = time_B[:, None, None, None, None]
        prediction = self.predict((1 - mix) * latent_BCFHW + mix * noise, time_B)
        return F.mse_loss(prediction, noise - latent_BCFHW)


def plain_step(trainer: Trainer) -> Work:
    given = AtHand.take(trainer)
    latent = given.normalize(given.mean_BCFHW)
    optimizer = torch.optim.AdamW(given.model.parameters(), lr=_LR, fused=True)

    def step() -> None:
        torch.autograd.backward(given.loss(latent))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def equal_step(trainer: Trainer) -> Work:
    given, settings = AtHand.take(trainer), trainer.recipe.train
    params = list(given.model.parameters())
    optimizer = torch.optim.AdamW(params, lr=_LR, fused=True)
    averages = [param.detach().clone() for param in params]
    limit, numbers = trainer.recipe.optim.clip_norm or 1.0, count(1)
    every, decay = (1, 0.999) if settings.ema is None else (settings.ema.every, settings.ema.decay)

    def step() -> None:
        latent = given.normalize(given.mean_BCFHW + given.std_BCFHW * torch.randn_like(given.mean_BCFHW))
        torch.autograd.backward(given.loss(latent))
        nn.utils.clip_grad_norm_(params, limit)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if next(numbers) % every == 0:
            torch._foreach_lerp_(averages, [param.detach() for param in params], 1 - decay**every)

    return step


def script_step(trainer: Trainer) -> Work:
    given, settings = AtHand.take(trainer), trainer.recipe.train
    accelerator = load_baseline("accelerate").Accelerator(cpu=True)
    optimizer: Any = torch.optim.AdamW(given.model.parameters(), lr=_LR, fused=True)
    schedule: Any = load_baseline("diffusers.optimization").get_scheduler("constant", optimizer)
    average = load_baseline("diffusers.training_utils").EMAModel(given.model.parameters())
    model, optimizer, schedule = accelerator.prepare(given.model, optimizer, schedule)
    limit = trainer.recipe.optim.clip_norm or 1.0
    every = 1 if settings.ema is None else settings.ema.every
    numbers = count(1)

    def step() -> None:
        with accelerator.accumulate(model):
            latent = given.normalize(given.mean_BCFHW + given.std_BCFHW * torch.randn_like(given.mean_BCFHW))
            loss = given.loss(latent)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        number = next(numbers)
        if number % every == 0:
            average.step(model.parameters())
        logs = {"loss": loss.detach().item(), "lr": schedule.get_last_lr()[0]}
        if number % settings.log_every == 0:
            accelerator.log(logs, step=number)

    return step
