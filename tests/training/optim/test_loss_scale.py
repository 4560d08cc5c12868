"""The loss scale: when it moves, that it changes nothing by itself, and runs in fp16 that overflow and recover."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frameloom.checkpoint.reader import read_state, step_folder
from frameloom.config.schema.optim import OptimSection
from frameloom.config.schema.training import LossScaleSection
from frameloom.core.errors import RunError
from frameloom.core.random import stream
from frameloom.training.loop import Trainer
from frameloom.training.optim.clipping import clip_within_step
from frameloom.training.optim.optimizer import build_optimizer
from frameloom.training.optim.precision import LossScale
from frameloom.training.train import train
from tests.training.runs import open_trainer


def test_a_dynamic_scale_grows_after_clean_windows_and_shrinks_at_once() -> None:
    scale = LossScale(LossScaleSection(initial=16, factor=4, window=3, minimum=2))
    seen, shrinks = [], []
    for is_clean in [True, True, True, True, False, True, True, True, False, False, False, False]:
        shrinks.append(scale.adapt(is_finite=is_clean, loss=1.0))
        seen.append(scale.scale)
    # The overflow at the fifth step begins a new window; the last one would go below the minimum.
    assert seen == [16, 16, 64, 64, 16, 16, 16, 64, 16, 4, 2, 2]
    assert scale.num_overflows == 5 and shrinks == [False] * 4 + [True] + [False] * 3 + [True] * 3 + [False]


def test_a_static_scale_stays() -> None:
    scale = LossScale(LossScaleSection(mode="static", initial=1024, window=1))
    assert not any(scale.adapt(is_finite=is_finite, loss=1.0) for is_finite in (True, False))
    assert scale.scale == 1024


def test_a_scale_has_an_upper_end() -> None:
    scale = LossScale(LossScaleSection(initial=LossScale.MAXIMUM / 2, window=1))
    for _ in range(3):
        scale.adapt(is_finite=True, loss=1.0)
    assert scale.scale == LossScale.MAXIMUM


def test_a_saved_scale_moves_on_alike() -> None:
    moves = [True, True, False, True, True, True, True, False]
    whole, first, second = (LossScale(LossScaleSection(initial=64, window=3)) for _ in range(3))
    for scale, part in ((whole, moves), (first, moves[:4])):
        for is_clean in part:
            scale.adapt(is_finite=is_clean, loss=1.0)
    second.load(json.loads(json.dumps(first.state())))
    for is_clean in moves[4:]:
        second.adapt(is_finite=is_clean, loss=1.0)
    assert second.state() == whole.state() != first.state()


@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize("max_norm", [None, 1e-3, 1e3])
def test_scaled_gradients_step_as_plain_ones_do(name: str, max_norm: float | None) -> None:
    """To the bit for powers of two: inside fused AdamW, and on the gradients themselves with others."""

    def step(scale: float, divisor: float) -> tuple[torch.Tensor, float]:
        param = nn.Parameter(torch.ones(64))
        optimizer = build_optimizer([("weight", param)], OptimSection(name=name, lr=0.1))
        param.grad = scale * torch.randn(64, generator=stream(1, "gradient"))
        norm = clip_within_step(optimizer, max_norm, scale=divisor)
        optimizer.step()
        return param.detach(), float(norm)

    plain, norm = step(1, 1)
    scaled, scaled_norm = step(2**16, 2**16)
    assert torch.equal(plain, scaled) and norm == scaled_norm
    assert not math.isclose(norm, step(2**16, 1)[1])


def run(world: Any, name: str, *overrides: str, steps: int = 6, **settings: object) -> Path:
    sections = {"steps": steps, "save_every": 2, "log_every": 1, **settings}
    # Processors without instructions for it take fifty times as long for half precision.
    data = {"buckets": {"_delete_": True, "64px": {"1": [1.0, 2]}}}
    return train(world.recipe("--name", name, *overrides, train=sections, data=data))


def digest(folder: Path, step: int = 6) -> dict[str, Any]:
    found = read_state(step_folder(folder / "checkpoints", step))
    return {"files": found["files"], "scale": found["loss_scale"]}


def values(folder: Path, key: str) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[f"train/{key}"] for line in lines]


def test_a_power_of_two_changes_no_bit_of_a_run(world: Any) -> None:
    plain = run(world, "plain")
    scaled = run(world, "scaled", loss_scale={"mode": "static", "initial": 4096})
    other = run(world, "other", loss_scale={"mode": "static", "initial": 1000})
    model = "model.safetensors"
    assert digest(plain)["files"][model] == digest(scaled)["files"][model] != digest(other)["files"][model]
    assert values(plain, "grad_norm") == values(scaled, "grad_norm")


def test_fp16_overflows_shrinks_its_scale_learns_and_resumes_to_the_bit(world: Any) -> None:
    settings = {"precision": "fp16", "nonfinite_limit": 1}
    scale = {"initial": 2.0**40, "factor": 256, "window": 2}
    whole = run(world, "whole", loss_scale=scale, **settings)
    seen = values(whole, "loss_scale")
    assert seen[:2] == [2.0**40, 2.0**32] and values(whole, "grad_norm")[0] is None
    assert all(math.isfinite(loss) for loss in values(whole, "loss"))
    assert digest(whole)["scale"]["num_overflows"] >= 2
    run(world, "parts", loss_scale=scale, steps=2, **settings)
    parts = run(world, "parts", loss_scale=scale, **settings)
    assert digest(parts) == digest(whole) and values(parts, "loss") == values(whole, "loss")
    model = "model.safetensors"
    first = read_state(step_folder(whole / "checkpoints", 4))["files"][model]
    assert first != digest(whole)["files"][model]
    full = run(world, "full")
    assert digest(full)["files"][model] != digest(whole)["files"][model]
    assert values(full, "loss")[0] == pytest.approx(values(whole, "loss")[0], rel=1e-2)


def make_trainer(world: Any, **settings: object) -> Trainer:
    sections = {"steps": 6, "save_every": 2, "log_every": 1, **settings}
    return open_trainer(world.recipe(train=sections), world.folder / "run")


def poison(trainer: Trainer, value: float) -> None:
    parameter = next(iter(trainer.task.model.parameters()))
    parameter.register_hook(lambda gradient: torch.full_like(gradient, value))


def test_an_overflow_changes_nothing_and_counts_only_at_the_least_scale(world: Any) -> None:
    trainer = make_trainer(world, loss_scale={"initial": 4, "minimum": 1}, nonfinite_limit=2)
    before = {name: tensor.clone() for name, tensor in trainer.task.model.state_dict().items()}
    poison(trainer, math.inf)
    steps = trainer.feed.steps(0, 0, 1)
    for scale in (4, 2):
        result = trainer.take_step(next(steps)[0])
        assert result.is_overflow and not result.is_finite and result.values["loss_scale"] == scale
    assert trainer.nonfinite == 0
    assert not trainer.take_step(next(steps)[0]).is_overflow and trainer.nonfinite == 1
    after = trainer.task.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    with pytest.raises(RunError, match="2 in a row"):
        trainer.take_step(next(steps)[0])


def test_a_loss_that_is_not_finite_is_no_overflow(world: Any) -> None:
    trainer = make_trainer(world, loss_scale={"initial": 4})
    with torch.no_grad():
        next(iter(trainer.task.model.parameters())).fill_(math.nan)
    result = trainer.take_step(next(trainer.feed.steps(0, 0, 1))[0])
    assert not result.is_overflow and trainer.nonfinite == 1 and result.values["loss_scale"] == 4
    assert trainer.stepper.state()["loss_scale"]["scale"] == 4
