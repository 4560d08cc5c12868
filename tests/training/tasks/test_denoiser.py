"""Validation on a grid of noise levels."""

from __future__ import annotations

import json

import pytest
import torch

from frameloom.training.run.folder import RunFolder
from frameloom.training.tasks.denoiser import half_width, student95, summarize_levels
from frameloom.training.train import build_trainer, train

VALIDATION = {"every": 2, "where": {"split": "heldout"}, "batches": 2, "levels": 4}


def test_bands_and_whole_are_means_with_intervals() -> None:
    loss_NL = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 1.0]])
    found = summarize_levels(loss_NL, torch.tensor([[0.25, 0.75]]).expand(3, 2))
    assert found["loss_0.00-0.50"] == pytest.approx(3) and found["loss_0.50-1.00"] == pytest.approx(3)
    assert found["validation_loss"] == pytest.approx((1.75 + 5.25 + 2) / 3)
    assert found["loss_0.00-0.50_ci95"] == pytest.approx(4.3027 * 2 / 3**0.5)
    assert list(summarize_levels(loss_NL[:1], torch.tensor([[0.5, 0.5]]))) == [
        "validation_loss",
        "loss_0.00-0.50",
        "loss_0.50-1.00",
    ]


def test_a_band_that_is_never_drawn_does_not_reach_the_whole() -> None:
    loss_NL = torch.tensor([[1.0, float("inf")], [2.0, float("inf")]])
    assert summarize_levels(loss_NL, torch.tensor([[1.0, 0.0]]).expand(2, 2))["validation_loss"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (29, 2.045), (999, 1.962)]
)
def test_student_quantiles_are_those_of_the_table(freedom: int, quantile: float) -> None:
    assert student95(freedom) == pytest.approx(quantile, rel=0.015)


def test_intervals_hold_the_mean_in_95_of_100_cases() -> None:
    drawn = torch.randn(2000, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inside = sum(abs(float(row.mean())) <= half_width(row) for row in drawn)
    assert 0.93 < inside / 2000 < 0.97


def test_two_calls_on_equal_weights_are_equal_and_other_weights_differ(world) -> None:
    recipe = world.recipe(
        validation=VALIDATION,
        objective={"noise_offset": 0.1, "input_perturbation": 0.1, "stratified_levels": 4, "shift": 3.0},
    )
    folder = RunFolder(world.folder / "run")
    folder.path.mkdir()
    trainer = build_trainer(recipe, folder, first_step=1)
    try:
        once, again = trainer.validate(), trainer.validate()
        batches, _ = next(trainer.feed.steps(0, 0, 1))
        trainer.take_step(batches)
        # The averaged weights of a trained step are other weights.
        after = trainer.validate()
    finally:
        for tracker in trainer.trackers:
            tracker.close()
    assert once == again and after != once
    bands = [name for name in once if name.startswith("loss_") and not name.endswith("ci95")]
    assert bands == ["loss_0.00-0.25", "loss_0.25-0.50", "loss_0.50-0.75", "loss_0.75-1.00"]
    assert all(once[f"{name}_ci95"] > 0 for name in bands)
    assert min(once[name] for name in bands) <= once["validation_loss"] <= max(once[name] for name in bands)


@pytest.mark.parametrize("kind", ["flow", "v", "sample"])
def test_every_band_is_written_to_the_metrics(world, kind: str) -> None:
    run = train(
        world.recipe("--train.steps", "2", validation=VALIDATION, objective={"kind": kind, "stratified_levels": 8})
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (found,) = [line for line in lines if "validation/validation_loss" in line]
    assert len([key for key in found if key.startswith("validation/loss_")]) == 8
    assert all(value is not None for value in found.values())
