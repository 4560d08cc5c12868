"""One optimizer step: a batch in pieces is the batch, whatever the objective makes of its samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from frameloom.builders.objective import build_objective
from frameloom.config.schema.objective import parse_objective
from frameloom.data.loading.batch import Batch
from frameloom.data.media.transforms import to_signed_range
from frameloom.training.loop import Trainer
from frameloom.training.tasks.denoiser import DenoiserTask
from frameloom.training.train import train
from tests.training.runs import losses, open_trainer

OBJECTIVES: dict[str, dict[str, Any]] = {
    "flow": {"shift": "sd3", "weighting": "cosmap"},
    "v with min-SNR": {"kind": "v", "min_snr_gamma": 5.0},
    "epsilon with all extras": {
        "kind": "epsilon",
        "min_snr_gamma": 5.0,
        "noise_offset": 0.1,
        "input_perturbation": 0.1,
        "stratified_levels": 4,
        "bias": {"strategy": "later", "multiplier": 2.0},
        "motion_share": 0.25,
    },
    "sample": {"kind": "sample"},
    "edm": {"kind": "edm"},
}


def make_trainer(world: Any, **sections: object) -> Trainer:
    data = {"buckets": {"_delete_": True, "64px": {"9": [1.0, 4]}}}
    return open_trainer(world.recipe(data=data, **sections), world.folder / "run")


def read_whole(trainer: Trainer) -> Batch:
    """A full batch of four; small buckets have others."""
    return next(batches[0] for batches, _ in trainer.feed.steps(0, 0, 1) if batches[0].size == 4)


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    pieces, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        pieces.append(
            replace(
                batch,
                rows=batch.rows[part],
                sample_indices=batch.sample_indices[part],
                captions=batch.captions[part],
                pixels_BCFHW=None if batch.pixels_BCFHW is None else batch.pixels_BCFHW[part],
                latents=None if batch.latents is None else (batch.latents[0][part], batch.latents[1][part]),
            )
        )
        start += size
    return pieces


def step_gradients(trainer: Trainer, batches: Sequence[Batch]) -> tuple[Tensor, float]:
    """(the gradients that the optimizer was given, the loss) of a step at rate zero, which moves nothing."""
    update, seen = replace(trainer.stepper.updates[0], lr_at=lambda number: 0.0, ema=None), []
    stepper = replace(trainer.stepper, updates=[update])

    def keep(*_: object) -> None:
        seen.append(torch.cat([param.grad.flatten() for param in update.params if param.grad is not None]))

    hook = update.optimizer.register_step_pre_hook(keep)
    result = stepper.step(1, batches)
    hook.remove()
    return seen[0], result.values["loss"]


def test_micro_batches_of_any_split_equal_one_batch(world: Any) -> None:
    trainer = make_trainer(world)
    batch = read_whole(trainer)
    assert isinstance(trainer.task, DenoiserTask) and batch.pixels_BCFHW is not None
    with torch.no_grad():  # once, as a cache would
        moments = trainer.task.vae.encode(to_signed_range(batch.pixels_BCFHW))
    latents = (moments.mean_BCFHW, torch.exp(0.5 * moments.logvar_BCFHW))
    batch = replace(batch, pixels_BCFHW=None, latents=latents)
    for name, settings in OBJECTIVES.items():
        trainer.task.objective = build_objective(parse_objective(settings))
        whole, loss = step_gradients(trainer, [batch])
        for sizes in ((2, 2), (1, 3)):
            pieces, other = step_gradients(trainer, cut(batch, sizes))
            assert (pieces - whole).norm() < 1e-5 * whole.norm(), name
            assert other == pytest.approx(loss, rel=1e-5), name
        # The control: a mean of means gives a sample of the smaller piece more weight.
        uneven = [step_gradients(trainer, [piece])[0] for piece in cut(batch, (1, 3))]
        assert (sum(uneven) / 2 - whole).norm() > 1e-3 * whole.norm(), name


def test_pieces_of_an_inpaint_batch_get_the_masks_of_the_whole(world: Any) -> None:
    model = {"overrides": {"cond_embed": True}}
    trainer = make_trainer(world, model=model, known={"law": "ends", "shares": {"i2v_head": 1, "t2v": 1}})
    batch = read_whole(trainer)
    whole, pieces = (step_gradients(trainer, cut(batch, sizes))[0] for sizes in ((4,), (1, 3)))
    assert (pieces - whole).norm() < 1e-5 * whole.norm()
    moved = [replace(piece, sample_indices=piece.sample_indices + 100) for piece in cut(batch, (1, 3))]
    assert (step_gradients(trainer, moved)[0] - whole).norm() > 1e-2 * whole.norm()


def test_a_recipe_from_before_halves_left_still_trains_and_hears_of_it(world, caplog: pytest.LogCaptureFixture) -> None:
    """Recipes inside of older runs hold the key."""
    words = ("--train.steps", "1", "--train.side_by_side")
    with caplog.at_level(logging.WARNING):
        runs = [train(world.recipe("--name", f"run-{value}", *words, value)) for value in ("auto", "true")]
    told = [record.getMessage() for record in caplog.records if "side_by_side" in record.getMessage()]
    assert told == ["train.side_by_side is true, which has no effect any more; remove it from the recipe"]
    assert losses(runs[0]) == losses(runs[1])
