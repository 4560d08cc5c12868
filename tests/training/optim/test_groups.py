"""Which parameters train, and at which rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from frameloom.checkpoint.reader import load_latest, read_state, step_folder
from frameloom.config.schema.optim import OptimSection
from frameloom.core.errors import ConfigError
from frameloom.training.loop import Trainer
from frameloom.training.optim.groups import freeze_parameters, group_parameters, hidden_matrices, matches
from frameloom.training.optim.optimizer import build_optimizer
from frameloom.training.run.folder import RunFolder
from frameloom.training.train import build_trainer, train


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (".", ["blocks.1.attn.weight", "blocks.10.attn.weight", "img_in.bias", "table"]),
        ("blocks.1", ["blocks.1.attn.weight"]),
        ("blocks.1.", ["blocks.1.attn.weight"]),
        ("attn.weight", ["blocks.1.attn.weight", "blocks.10.attn.weight"]),
        ("blocks.*.weight", ["blocks.1.attn.weight", "blocks.10.attn.weight"]),
        ("*in*", ["img_in.bias"]),
        ("img", []),
        ("img_in", ["img_in.bias"]),
        ("table", ["table"]),
        ("blocks.1?", ["blocks.10.attn.weight"]),
    ],
)
def test_patterns_are_whole_parts_of_a_name(pattern: str, found: list[str]) -> None:
    names = ["blocks.1.attn.weight", "blocks.10.attn.weight", "img_in.bias", "table"]
    assert [name for name in names if matches(name, pattern)] == found


def make_model() -> nn.ModuleDict:
    blocks = nn.ModuleList([nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)])
    return nn.ModuleDict({"first": nn.Linear(2, 3), "blocks": blocks, "last": nn.Linear(3, 2)})


def training(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if param.requires_grad]


def test_only_what_is_named_trains_and_what_is_frozen_stays_frozen() -> None:
    model = make_model()
    model["blocks"][0].bias.requires_grad_(False)
    freeze_parameters(model, None, ())
    assert len(training(model)) == 9
    freeze_parameters(model, ["blocks", "last.bias"], ["blocks.1"])
    assert training(model) == ["blocks.0.weight", "blocks.2.weight", "blocks.2.bias", "last.bias"]


@pytest.mark.parametrize(
    ("trainable", "frozen", "message"),
    [
        (["blocsk.0"], [], r"optim\.trainable has 'blocsk\.0'.*did you mean 'blocks\.0'\?"),
        (["blocks"], ["wieght"], r"optim\.frozen has 'wieght'.*did you mean 'weight'\?"),
        (["transformer_blocks.3.attn1"], [], r"their names are like first\.weight"),
    ],
)
def test_a_pattern_without_a_parameter_is_refused_with_the_nearest(trainable, frozen, message: str) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=message):
        freeze_parameters(model, trainable, frozen)
    assert len(training(model)) == 10


def test_groups_have_their_own_rates_and_decays_and_the_first_match_counts() -> None:
    rates = ({"match": "first", "lr": 1e-4}, {"match": "*.weight", "weight_decay": 0.5}, {"match": "last", "lr": 0.0})
    section = OptimSection(lr=1e-3, weight_decay=0.1, groups=rates)
    groups = group_parameters(make_model().named_parameters(), section)
    found = {name: (group["lr_factor"], group["weight_decay"]) for group in groups for name, _ in group["params"]}
    assert found["first.weight"] == (pytest.approx(0.1), 0.1) and found["first.bias"] == (pytest.approx(0.1), 0.0)
    assert found["blocks.0.weight"] == (1.0, 0.5) and found["blocks.1.weight"] == (1.0, 0.0)
    assert found["last.weight"] == (1.0, 0.5) and found["last.bias"] == (0.0, 0.0)
    assert len(found) == 10
    with pytest.raises(ConfigError, match=r"optim\.groups\.0\.match has 'lats'.*did you mean 'last'\?"):
        build_optimizer(make_model().named_parameters(), OptimSection(groups=({"match": "lats", "lr": 1e-4},)))


def test_hidden_matrices_are_those_of_blocks() -> None:
    assert hidden_matrices(make_model()) == {"blocks.0.weight", "blocks.2.weight"}


def build(world, **optim: object) -> Trainer:
    folder = RunFolder(world.folder / "run")
    folder.path.mkdir()
    trainer = build_trainer(world.recipe(optim=optim), folder, first_step=1)
    for tracker in trainer.trackers:
        tracker.close()
    return trainer


def test_a_step_moves_each_group_at_its_own_rate(world) -> None:
    schedule = {"warmup_steps": 3}
    trainer = build(world, lr=1e-3, schedule=schedule, groups=[{"match": "final_layer", "lr": 1e-4}])
    batches, _ = next(iter(trainer.feed.steps(0, 0, 1)))
    result = trainer.stepper.step(2, batches)
    rates = {
        name: group["lr"]
        for group in trainer.stepper.updates[0].optimizer.param_groups
        for name in group["param_names"]
    }
    assert result.values["lr"] == pytest.approx(1e-3 * 2 / 4)
    assert {round(rate / result.values["lr"], 6) for name, rate in rates.items() if "final_layer" in name} == {0.1}
    assert {rate for name, rate in rates.items() if "final_layer" not in name} == {result.values["lr"]}


def test_scaled_rate_counts_the_samples_of_a_step(world) -> None:
    recipe = world.recipe("--optim.scale_lr", "true", "--optim.lr", "1e-4", "--train.accumulate", "3")
    folder = RunFolder(world.folder / "run")
    folder.path.mkdir()
    trainer = build_trainer(recipe, folder, first_step=1)
    for tracker in trainer.trackers:
        tracker.close()
    assert trainer.stepper.updates[0].lr_at(1) == pytest.approx(1e-4 * 4 * 3)
    plain = build(world.__class__(world.shared, world.folder / "run"), lr=1e-4)
    assert plain.stepper.updates[0].lr_at(1) == pytest.approx(1e-4)


def digests(run: Path, step: int) -> dict[str, str]:
    return dict(read_state(step_folder(run / "checkpoints", step))["files"])


FROZEN = {"lr": 1e-3, "trainable": ["double_blocks", "single_blocks"], "frozen": ["single_blocks.*.bias"]}


def test_a_partly_frozen_run_resumes_to_the_bit_and_leaves_the_rest_alone(world) -> None:
    whole = train(world.recipe("--name", "whole", "--train.steps", "3", optim=FROZEN))
    train(world.recipe("--name", "parts", "--train.steps", "2", optim=FROZEN))
    parts = train(world.recipe("--name", "parts", "--train.steps", "3", optim=FROZEN))
    assert digests(parts, 3) == digests(whole, 3)
    everything = train(world.recipe("--name", "all", "--train.steps", "3"))
    assert digests(everything, 3)["model.safetensors"] != digests(whole, 3)["model.safetensors"]
    saved = load_latest(whole / "checkpoints")
    assert saved is not None
    start = build(world, **FROZEN).task.model.state_dict()
    moved = {name for name, value in saved.tensors["model"].items() if not torch.equal(value, start[name])}
    assert moved and all(name.startswith(("double_blocks", "single_blocks")) for name in moved)
    assert not any(name.startswith("single_blocks") and name.endswith("bias") for name in moved)
    assert set(saved.tensors["ema"]) < set(saved.tensors["model"])
    assert json.loads((whole / "export" / "config.json").read_text())["kind"] == "denoiser"
