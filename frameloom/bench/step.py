"""A training step of our loop against the plainest PyTorch loop on the same model and the same batches.

Ours reads the batch from the caches, draws keyed noise, clips, averages the weights and logs; the plain loop has its
tensors at hand and does forward, loss, backward and AdamW. Both take turns within one run, each of them first in every
other round; the overhead is the median of the rounds' own ratios, which a busy machine disturbs least.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

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

Step = Callable[[], None]


@dataclass(frozen=True)
class Comparison:
    """Median seconds per step, and what our loop costs on top, as a share: the median over all rounds."""

    name: str
    ours_s: float
    plain_s: float
    overhead: float
    cpu_overhead: float
    rounds: int

    def to_json(self) -> dict[str, float | str]:
        return asdict(self)

    def describe(self) -> list[str]:
        return [
            f"{self.name}, {self.rounds} rounds in turn",
            f"  ours   {self.ours_s * 1e3:8.1f} ms",
            f"  plain  {self.plain_s * 1e3:8.1f} ms",
            f"  our loop costs {self.overhead:+.1%} (processor time {self.cpu_overhead:+.1%}), median of the rounds",
        ]


def compare_step(rounds: int = 100, warmup: int = 6) -> Comparison:
    """Both loops in turn on the demo's denoiser, batch 32."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        recipe = prepare_demo(Path(folder), steps=warmup + rounds)
        trainer = build_trainer(recipe, RunFolder(Path(folder) / "run"), first_step=1)
        for tracker in trainer.trackers:
            stack.callback(tracker.close)
        ours, plain = _our_step(trainer), plain_step(trainer)
        for _ in range(warmup):
            ours()
            plain()
        times = [_time_round(ours, plain, ours_first=bool(number % 2)) for number in range(rounds)]
    ours_wall, ours_cpu, plain_wall, plain_cpu = zip(*times, strict=True)
    return Comparison(
        "training step, demo denoiser",
        statistics.median(ours_wall),
        statistics.median(plain_wall),
        _median_ratio(ours_wall, plain_wall) - 1,
        _median_ratio(ours_cpu, plain_cpu) - 1,
        rounds,
    )


def _time_round(ours: Step, plain: Step, *, ours_first: bool) -> tuple[float, float, float, float]:
    """Wall and processor seconds of our step, then of the plain one, in whichever order they ran."""
    if ours_first:
        first, second = _time(ours), _time(plain)
        return *first, *second
    second, first = _time(plain), _time(ours)
    return *first, *second


def _median_ratio(ours: Sequence[float], plain: Sequence[float]) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(ours, plain, strict=True))


def prepare_demo(folder: Path, steps: int, num_clips: int = 160) -> Recipe:
    """A small set, a fresh autoencoder and both caches, as a run would have them."""
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
        ],
    )
    vae = build_vae(recipe.vae.model_copy(update={"weights": None}), seed=0)
    write_model_folder(
        folder / "vae", kind="vae", name=vae.name, config=asdict(vae.config), tensors=vae.model.state_dict()
    )
    (folder / "run").mkdir()
    list(write_caches(recipe))
    return recipe


def _our_step(trainer: Trainer) -> Step:
    steps = trainer.feed.steps(0, 0, trainer.recipe.train.accumulate)

    def step() -> None:
        batches, position = next(steps)
        result = trainer.take_step(batches)
        trainer.epoch, trainer.position = position
        trainer.note(result)
        if trainer.step % trainer.recipe.train.log_every == 0:
            trainer.log({**result.values, **trainer.rates()})

    return step


def plain_step(trainer: Trainer) -> Step:
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


def _time(step: Step) -> tuple[float, float]:
    """Wall and processor seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu
