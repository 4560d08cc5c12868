"""Autoencoders trained against a discriminator: turns, the start step, accumulation, and resuming to the bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from frameloom.checkpoint.model_folder import read_weights
from frameloom.checkpoint.reader import load_checkpoint, step_folder
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.training.loop import Trainer
from frameloom.training.run.resuming import ResumeChoices
from frameloom.training.task import StepContext
from frameloom.training.tasks.autoencoder import AutoencoderTask, Critic
from frameloom.training.train import train
from tests.faults.runs import digests, metrics, stop_after
from tests.training.test_loop import make_trainer, poison

JUDGE = {"channels": 4, "num_layers": 2}
CLIPS = {"buckets": {"_delete_": True, "64px": {"5": [1.0, 2]}}}

SMALL = (
    "--data.policy",
    "fixed",
    "--data.buckets",
    "null",
    "--data.fixed",
    "{height: 32, width: 32, frames: 5, batch: 4}",
)


def settings(**judge: Any) -> dict[str, Any]:
    return {"task": "autoencoder", "data": CLIPS, "autoencoder": {"discriminator": {**JUDGE, **judge}}}


def start(world, *overrides: str, **judge: Any) -> tuple[Trainer, Critic]:
    trainer = make_trainer(world, "--run.trackers", "[]", *overrides, **settings(**judge))
    assert isinstance(trainer.task, AutoencoderTask) and trainer.task.critic is not None
    return trainer, trainer.task.critic


def copy_tensors(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    tensors = trainer.snapshot().tensors
    return {group: {name: value.clone() for name, value in tensors[group].items()} for group in tensors}


def changed(before: dict[str, dict[str, Tensor]], after: dict[str, dict[str, Tensor]]) -> set[str]:
    """Groups of a checkpoint with a number that differs; a gradient that is 0 moves no weight but counts a step."""
    return {
        group
        for group in before
        if any(not torch.equal(before[group][name], after[group][name]) for name in before[group])
    }


@pytest.mark.parametrize(
    ("kind", "turns", "stops"), [("3d", "alternate", (2, 3)), ("2d", "alternate", (2,)), ("3d", "both", (3,))]
)
def test_a_resumed_run_equals_one_never_stopped_whoever_took_the_last_turn(world, kind, turns, stops):
    """Weights, both optimizers, the average and the discriminator's running statistics; odd and even steps."""
    chosen = settings(kind=kind, update=turns, start=1, dropout=0.3 if turns == "both" else 0.0)
    recipe = world.recipe("--train.steps", "5", "--train.save_every", "1", "--train.keep", "20", **chosen)
    run = train(recipe)
    for step in stops:
        again = world.folder / f"again-{step}"
        stop_after(run, step, again / "run")
        train(recipe.model_copy(update={"run": recipe.run.model_copy(update={"folder": str(again)})}))
        assert digests(again / "run", 5) == digests(run, 5)
        assert metrics(again / "run") == metrics(run)
    assert {"discriminator.safetensors", "discriminator_optimizer.safetensors"} < set(digests(run, 5))
    # The control: the turn that was to come, not the one that was saved.
    assert digests(run, 4)["discriminator.safetensors"] != digests(run, 5)["discriminator.safetensors"]


def test_networks_take_turns_from_the_start_step_on(world):
    """Steps 1 to 3 are the autoencoder's alone; of the following ones every even one is the discriminator's."""
    trainer, _ = start(world, start=3)
    steps, turns = trainer.feed.steps(0, 0, 1), []
    for _ in range(6):
        before = copy_tensors(trainer)
        values = trainer.take_step(next(steps)[0]).values
        found = changed(before, copy_tensors(trainer))
        turns.append(("model" in found, "discriminator_optimizer" in found, "discriminator_accuracy" in values))
        assert ("ema" in found) == ("model" in found)
        assert ("generator" in values) == (trainer.step > 3 and "model" in found)
    own, other = (True, False, False), (False, True, True)
    assert turns == [own, own, own, other, own, other]


def test_both_networks_may_train_in_one_step(world):
    trainer, _ = start(world, update="both")
    before = copy_tensors(trainer)
    values = trainer.take_step(next(trainer.feed.steps(0, 0, 1))[0]).values
    assert changed(before, copy_tensors(trainer)) == set(before)
    assert {"loss", "generator", "adversarial_weight", "discriminator_loss", "discriminator_grad_norm"} < set(values)
    assert 0 <= values["discriminator_accuracy"] <= 1


def test_the_weights_of_the_discriminator_get_no_gradient_in_the_turn_of_the_autoencoder(world):
    trainer, critic = start(world)
    trainer.take_step(next(trainer.feed.steps(0, 0, 1))[0])
    assert all(weight.grad is None and weight.requires_grad for weight in critic.model.parameters())


def test_accumulated_micro_batches_are_one_step_of_each_network(world):
    trainer, _ = start(world, "--train.accumulate", "2", update="both")
    steps = trainer.feed.steps(0, 0, 2)
    batches = next(steps)[0]
    assert len(batches) == 2
    one_by_one = []
    for batch in batches:
        with torch.no_grad():
            one_by_one.append(float(trainer.task.discriminator_losses(StepContext(0), batch)[0].mean()))
    values = trainer.take_step(batches).values
    assert values["discriminator_loss"] == pytest.approx(sum(one_by_one) / 2, rel=1e-5)
    counts = [
        value for name, value in trainer.stepper.tensors()["discriminator_optimizer"].items() if name.startswith("step")
    ]
    assert {float(count) for count in counts} == {1.0}


@pytest.mark.parametrize("step", [1, 2])
def test_a_turn_that_is_not_finite_changes_nothing_not_even_running_statistics(world, step):
    trainer, critic = start(world)
    steps = trainer.feed.steps(0, 0, 1)
    for _ in range(step - 1):
        trainer.take_step(next(steps)[0])
    if step == 1:
        poison(trainer, math.nan)
    else:
        critic.model.main[0].weight.register_hook(lambda gradient: torch.full_like(gradient, math.nan))
    before = copy_tensors(trainer)
    assert not trainer.take_step(next(steps)[0]).is_finite
    assert not changed(before, copy_tensors(trainer))


def test_a_constant_weight_needs_no_gradient_of_the_last_layer(world):
    first = ("--autoencoder.train_only", "encoder")
    with pytest.raises(ConfigError, match=r"adaptive.*train_only|decoder's last layer"):
        start(world, *first)
    trainer, _ = start(world, *first, adaptive=False, weight=0.25)
    values = trainer.take_step(next(trainer.feed.steps(0, 0, 1))[0]).values
    assert values["adversarial_weight"] == 0.25


def test_recompute_changes_nothing_but_memory(world):
    found = []
    for folder, recompute in (("plain", "false"), ("saving", "true")):
        (world.folder / folder).mkdir()
        trainer, _ = start(dataclasses.replace(world, folder=world.folder / folder), "--train.recompute", recompute)
        steps = trainer.feed.steps(0, 0, 1)
        found.append([trainer.take_step(next(steps)[0]).values for _ in range(3)])
    assert found[0] == found[1]
    assert found[0][0]["generator"] != found[0][2]["generator"]


def test_the_discriminator_has_its_own_rate_decay_and_clipping(world):
    judge = {"lr": 5e-4, "weight_decay": 0.2, "clip_norm": 1e-3}
    trainer, _ = start(world, "--optim.lr", "1e-4", "--optim.schedule.warmup_steps", "4", **judge)
    own, other = trainer.stepper.updates
    assert other.lr_at(2) == pytest.approx(5 * own.lr_at(2))
    groups = other.optimizer.param_groups
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.2]
    assert (other.phase.optim.clip_norm, own.phase.optim.clip_norm) == (1e-3, 1.0)
    assert trainer.stepper.ema is own.ema is not None and other.ema is None


def test_a_checkpoint_is_refused_when_the_discriminator_was_switched_or_changed(world):
    run = train(world.recipe("--train.steps", "2", **settings()))
    with pytest.raises(CheckpointError, match=r"autoencoder\.discriminator was switched"):
        train(world.recipe(task="autoencoder", data=CLIPS), ResumeChoices(accept_recipe_change=True))
    with pytest.raises(CheckpointError, match="discriminator does not fit"):
        train(world.recipe(**settings(channels=8)), ResumeChoices(accept_recipe_change=True))
    assert not any(name.startswith("main.") for name in read_weights(run).tensors)


def test_a_stage_can_start_from_the_discriminator_of_another(world):
    run = train(world.recipe("--train.steps", "2", **settings()))
    file = step_folder(run / "checkpoints", 2) / "discriminator.safetensors"
    _, critic = start(world, weights=str(file))
    saved = load_checkpoint(file.parent).tensors["discriminator"]
    own = critic.model.state_dict()
    assert all(torch.equal(own[name], saved[name]) for name in saved)
    _, fresh = start(world)
    assert not torch.equal(fresh.model.state_dict()["main.0.weight"], saved["main.0.weight"])


def test_the_discriminator_learns_to_tell_reconstructions_from_clips(world):
    """Against an autoencoder that hardly moves, its accuracy goes from chance to most patches."""
    trainer, _ = start(world, *SMALL, "--optim.lr", "1e-7", update="both", channels=16, lr=1e-3)
    steps = trainer.feed.steps(0, 0, 1)
    results = [trainer.take_step(next(steps)[0]).values for _ in range(40)]
    first, last = (sum(one["discriminator_accuracy"] for one in part) / 5 for part in (results[:5], results[-5:]))
    assert first < 0.65 and last > 0.8
    assert results[-1]["discriminator_loss"] < 0.6 < results[0]["discriminator_loss"]
