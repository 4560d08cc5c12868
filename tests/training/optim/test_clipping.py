"""Limits of the gradient norm, and steps that are left out for it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from frameloom.checkpoint.reader import read_state, step_folder
from frameloom.config.schema.optim import ClipFadeSection, SpikeSection
from frameloom.training.loop import Trainer
from frameloom.training.optim.clipping import FadingLimit, SpikeGuard, clip_gradients
from frameloom.training.run.folder import RunFolder
from frameloom.training.train import build_trainer, train


def test_the_limit_narrows_to_its_end_and_stays() -> None:
    rule = FadingLimit(0.05, ClipFadeSection())
    assert [rule.at(step) for step in (0, 500, 1000, 9999)] == pytest.approx([0.25, 0.15, 0.05, 0.05])
    assert FadingLimit(0.05, ClipFadeSection(fade_steps=0)).at(0) == 0.05


def test_spikes_are_cut_harder_once_the_limit_is_narrow() -> None:
    rule = FadingLimit(0.05, ClipFadeSection())
    assert rule.for_norm(1000, 10.0) == 0.05
    assert rule.for_norm(1001, 0.2) == 0.05
    assert rule.for_norm(1001, 0.4) == pytest.approx(0.05 / 8)
    assert rule.for_norm(1001, 100.0) == pytest.approx(0.005)
    assert rule.for_norm(500, 100.0) == pytest.approx(0.15)


def test_gradients_are_clipped_to_what_the_rule_gives_for_their_norm() -> None:
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.full((4,), 5.0)
    seen: list[float] = []

    def rule(norm: float) -> float:
        seen.append(norm)
        return norm / 4

    assert clip_gradients([param], rule).item() == 10
    assert seen == [10.0] and param.grad.norm().item() == pytest.approx(2.5, rel=1e-5)


def test_a_norm_far_above_the_median_is_a_spike() -> None:
    guard = SpikeGuard(SpikeSection(ratio=3.0, window=8))
    assert not guard.is_spike(100.0)  # nothing is known yet
    assert not any(guard.is_spike(1.0) for _ in range(5))
    assert not guard.is_spike(2.9) and guard.is_spike(3.1)
    assert guard.num_spikes == 1


def test_a_norm_that_stays_high_is_no_spike_for_long() -> None:
    guard = SpikeGuard(SpikeSection(ratio=3.0, window=8))
    found = [guard.is_spike(norm) for norm in [1.0] * 8 + [10.0] * 8]
    assert found[:8] == [False] * 8 and found[8:] == [True] * 4 + [False] * 4


def test_norms_that_are_not_finite_are_not_remembered() -> None:
    guard = SpikeGuard(SpikeSection(ratio=3.0, window=8))
    for norm in [1.0] * 4 + [float("nan"), float("inf")] * 8:
        assert not guard.is_spike(norm)
    assert guard.state() == {"num_spikes": 0, "norms": [1.0] * 4}


def test_a_guard_that_was_saved_judges_alike() -> None:
    norms = [1.0, 2.0, 3.0, 2.5, 1.5, 20.0, 2.0, 30.0]
    whole, first, second = (SpikeGuard(SpikeSection(ratio=4.0, window=5)) for _ in range(3))
    judged = [whole.is_spike(norm) for norm in norms]
    for norm in norms[:5]:
        first.is_spike(norm)
    second.load(json.loads(json.dumps(first.state())))
    assert [second.is_spike(norm) for norm in norms[5:]] == judged[5:] == [True, False, True]
    assert second.state() == {**whole.state(), "num_spikes": 2}


def build(world, name: str, **optim: object) -> Trainer:
    folder = RunFolder(world.folder / name)
    folder.path.mkdir()
    trainer = build_trainer(world.recipe("--name", name, optim=optim), folder, first_step=1)
    for tracker in trainer.trackers:
        tracker.close()
    return trainer


def test_a_spike_changes_nothing_and_is_counted(world) -> None:
    trainer = build(world, "run", skip_spikes={"ratio": 2.0, "window": 4})
    guard, model = trainer.stepper.updates[0].guard, trainer.task.model
    assert guard is not None
    batches, _ = next(iter(trainer.feed.steps(0, 0, 1)))
    guard.load({"num_spikes": 3, "norms": [1e-9] * 4})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = trainer.stepper.step(1, batches)
    assert result.is_spike and result.is_finite and result.values["spikes"] == 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    guard.load({"num_spikes": 4, "norms": [1e9] * 4})
    result = trainer.stepper.step(2, batches)
    assert not result.is_spike and result.values["spikes"] == 4
    assert not all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_fading_limit_clips_by_step_and_norm(world) -> None:
    trainer = build(world, "run", clip_norm=1e-3, clip_fade={"ratio": 4.0, "fade_steps": 2})
    optimizer = trainer.stepper.updates[0].optimizer
    seen: list[float] = []

    def keep_norm(*_: object) -> None:
        """What the step moves by: fused AdamW divides gradients by `grad_scale` itself."""
        grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
        divisor = 1.0 if optimizer.grad_scale is None else float(optimizer.grad_scale)
        seen.append(float(nn.utils.get_total_norm([grad for grad in grads if grad is not None])) / divisor)

    optimizer.register_step_pre_hook(keep_norm)
    batches, _ = next(iter(trainer.feed.steps(0, 0, 1)))
    norms = [trainer.stepper.step(number, batches).values["grad_norm"] for number in (1, 2, 3, 4)]
    assert all(norm > 1e-2 for norm in norms)  # every one would be a spike once the limit is narrow
    assert seen == pytest.approx([4e-3, 2.5e-3, 1e-3, 1e-4], rel=1e-3)


def test_a_run_with_spikes_logs_them_and_resumes_to_the_bit(world, caplog) -> None:
    optim = {"lr": 1e-3, "skip_spikes": {"ratio": 1.01, "window": 4}}
    with caplog.at_level(logging.WARNING, logger="frameloom"):
        whole = train(world.recipe("--name", "whole", "--train.steps", "9", optim=optim))
    assert "far above the usual" in caplog.text
    train(world.recipe("--name", "parts", "--train.steps", "6", optim=optim))
    parts = train(world.recipe("--name", "parts", "--train.steps", "9", optim=optim))
    assert state(parts)["files"] == state(whole)["files"] and state(parts)["spikes"] == state(whole)["spikes"]
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["train/spikes"] == state(whole)["spikes"]["num_spikes"] > 0
    plain = train(world.recipe("--name", "plain", "--train.steps", "9", optim={"lr": 1e-3}))
    assert state(plain)["files"]["model.safetensors"] != state(whole)["files"]["model.safetensors"]


def state(run: Path) -> dict:
    return read_state(step_folder(run / "checkpoints", 9))
