"""Recomputed blocks: which ones, what they keep, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.training import RecomputeSection
from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.models.registry import get_denoiser
from frameloom.models.text.base import TextStates
from frameloom.training.memory.recompute import apply_recompute, choose_blocks, group_blocks, recompute_blocks
from frameloom.training.task import StepContext
from frameloom.training.train import train
from tests.models.denoisers.contract import SavedBytes
from tests.training.test_loop import make_trainer, records

CPU = torch.device("cpu")
SMALL = {
    "opensora2": {
        "hidden_size": 32,
        "num_heads": 2,
        "axes_dim": [4, 6, 6],
        "depth": 3,
        "depth_single_blocks": 4,
        "init": "default",
    },
    "latte": {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 16},
}


def build(family: str) -> nn.Module:
    config = get_denoiser(family).configure(
        "tiny", latent_channels=4, text_width=24, pooled_width=12, overrides=SMALL[family]
    )
    model = get_denoiser(family).build(config, generator=stream(0, "test weights"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=stream(0, "test shake")))
    return model


def backward(model: nn.Module, family: str) -> tuple[int, list[Tensor]]:
    """Bytes held between the passes, and all gradients."""
    generator = stream(0, "test inputs")
    text = TextStates(
        torch.randn(2, 5, 24, generator=generator),
        torch.ones(2, 5, dtype=torch.bool),
        torch.randn(2, 12, generator=generator),
    )
    noisy = torch.randn(2, 4, 3, 4, 8, generator=generator)
    with SavedBytes(model) as saved:
        loss = model(noisy, torch.tensor([0.2, 0.7]), text.conditions()).square().mean()
    loss.backward()
    return saved.total, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def run(family: str, settings: RecomputeSection | bool) -> tuple[int, list[Tensor]]:
    model = build(family)
    apply_recompute(model, model.blocks(), settings, CPU)
    return backward(model, family)


def count_chosen(family: str, **settings: Any) -> dict[str, int]:
    """Recomputed blocks of each kind; they must be the first ones."""
    model = build(family)
    kinds = group_blocks(model, model.blocks())
    chosen = {id(block) for block in choose_blocks(kinds, RecomputeSection(**settings))}
    counts = {kind: sum(id(block) in chosen for block in blocks) for kind, blocks in kinds.items()}
    assert all(id(block) in chosen for kind, blocks in kinds.items() for block in blocks[: counts[kind]])
    return counts


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        ("opensora2", {}, {"double_blocks": 3, "single_blocks": 4}),
        ("opensora2", {"blocks": {"double_blocks": 2, "single_blocks": 100}}, {"double_blocks": 2, "single_blocks": 4}),
        ("opensora2", {"blocks": {"double_blocks": 0}}, {"double_blocks": 0, "single_blocks": 4}),
        ("opensora2", {"skip": 3}, {"double_blocks": 0, "single_blocks": 1}),
        ("opensora2", {"skip": 1, "blocks": {"single_blocks": 1}}, {"double_blocks": 2, "single_blocks": 1}),
        ("latte", {"skip": 1}, {"transformer_blocks": 2, "temporal_transformer_blocks": 2}),
    ],
)
def test_the_first_blocks_of_each_kind_are_recomputed(
    family: str, settings: dict[str, Any], expected: dict[str, int]
) -> None:
    assert count_chosen(family, **settings) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every": 2}, {"double_blocks": [0, 2], "single_blocks": [0, 2]}),
        ({"every": 3}, {"double_blocks": [0], "single_blocks": [0, 3]}),
        ({"every": 2, "skip": 1}, {"double_blocks": [0], "single_blocks": [0, 2]}),
        ({"every": 2, "blocks": {"double_blocks": 0}}, {"double_blocks": [], "single_blocks": [0, 2]}),
    ],
)
def test_every_kth_block_is_recomputed(settings: dict[str, Any], expected: dict[str, list[int]]) -> None:
    model = build("opensora2")
    kinds = group_blocks(model, model.blocks())
    chosen = {id(block) for block in choose_blocks(kinds, RecomputeSection(**settings))}
    found = {
        kind: [index for index, block in enumerate(blocks) if id(block) in chosen] for kind, blocks in kinds.items()
    }
    assert found == expected
    held, gradients = run("opensora2", RecomputeSection(**settings))
    plain, others = run("opensora2", False)
    whole, _ = run("opensora2", True)
    assert whole < held < plain
    assert all(torch.equal(ours, other) for ours, other in zip(gradients, others, strict=True))


@pytest.mark.parametrize("family", SMALL)
def test_fewer_recomputed_blocks_keep_more_and_change_nothing(family: str) -> None:
    plain, gradients = run(family, False)
    settings = [True, RecomputeSection(skip=1), RecomputeSection(skip=2)]
    kept = [plain]
    for setting in reversed(settings):
        num_bytes, others = run(family, setting)
        kept.append(num_bytes)
        assert all(torch.equal(ours, other) for ours, other in zip(gradients, others, strict=True))
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4
    assert kept[-1] < 0.5 * plain
    changed = build(family)
    with torch.no_grad():
        next(changed.parameters()).mul_(1.5)
    others = backward(changed, family)[1]
    assert not all(torch.equal(ours, other) for ours, other in zip(gradients, others, strict=True))


def test_a_kind_can_keep_its_activations() -> None:
    whole, _ = run("opensora2", True)
    doubles, _ = run("opensora2", RecomputeSection(blocks={"single_blocks": 0}))
    singles, _ = run("opensora2", RecomputeSection(blocks={"double_blocks": 0}))
    plain, _ = run("opensora2", False)
    assert whole < min(doubles, singles) <= max(doubles, singles) < plain
    # What one kind saves, the other does not; together it is all.
    assert (plain - doubles) + (plain - singles) == pytest.approx(plain - whole, rel=0.1)


def test_offloaded_blocks_hold_a_copy_of_their_inputs_alone() -> None:
    """On the CPU the copy costs memory, but it shows what waits elsewhere on a GPU."""
    held, gradients = [], []
    for options in ({}, {"offload": True}):
        model = build("opensora2")
        recompute_blocks(model.blocks(), **options)
        num_bytes, found = backward(model, "opensora2")
        held.append(num_bytes)
        gradients.append(found)
    assert all(torch.equal(ours, other) for ours, other in zip(*gradients, strict=True))
    # The hooks outside the blocks no longer see what the blocks were given.
    assert held[1] < held[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocks": {"double_block": 3}}, "train.recompute.blocks: 'double_block' is not known; did you mean"),
        ({"skip": 4}, r"skip 4.*leave nothing to recompute of 3 double_blocks, 4 single_blocks"),
        ({"offload": True}, "the run computes on the CPU"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    model = build("opensora2")
    with pytest.raises(ConfigError, match=message):
        apply_recompute(model, model.blocks(), RecomputeSection(**settings), CPU)


def test_a_recipe_names_kinds_of_its_own_family(world) -> None:
    blocks = {"train": {"recompute": {"blocks": {"double_blocks": 1}}}}
    recipe = world.recipe(**blocks)
    assert recipe.train.recompute == RecomputeSection(blocks={"double_blocks": 1})
    assert world.recipe("--train.recompute", "false", **blocks).train.recompute is False
    with pytest.raises(ConfigError, match=r"train.recompute.blocks has 'double_blocks', which latte has no blocks of"):
        load_recipe(world.write_recipe(**blocks, model={"_delete_": True, "family": "latte"}, objective={"kind": "v"}))


def test_a_buffer_needs_something_to_wait_in_it(world) -> None:
    with pytest.raises(ConfigError, match=r"train.recompute.buffer is 25GB, but nothing waits.*offload: true"):
        world.recipe(train={"recompute": {"buffer": "25GB"}})
    with pytest.raises(ConfigError, match=r"train.recompute.buffer.*an amount of memory: 25GB, 800MB"):
        world.recipe(train={"recompute": {"offload": True, "buffer": "25 gigs"}})
    assert world.recipe(train={"recompute": {"offload": True, "buffer": "25GB"}}).train.recompute.buffer == "25GB"


@pytest.mark.parametrize("task", ["denoiser", "autoencoder"])
def test_a_run_with_some_blocks_recomputed_equals_one_without(world, task: str) -> None:
    steps = ("--train.steps", "2")
    plain = train(world.recipe("--name", "plain", *steps, task=task))
    chosen = {"blocks": {"single_blocks": 0}} if task == "denoiser" else {"skip": 1}
    saving = train(world.recipe("--name", "saving", *steps, task=task, train={"recompute": chosen}))
    other = train(world.recipe("--name", "other", *steps, "--seed", "43", task=task, train={"recompute": chosen}))
    assert records(plain, "train/loss") == records(saving, "train/loss") != records(other, "train/loss")


def test_the_trainer_keeps_less_with_recompute(world) -> None:
    held = {}
    for name in ("false", "true"):
        trainer = make_trainer(world, "--train.recompute", name)
        batches, _ = next(trainer.feed.steps(0, 0, 1))
        with SavedBytes(trainer.task.model) as saved:
            losses, _ = trainer.task.losses(StepContext(0), batches[0])
        held[name] = saved.total
        losses.sum().backward()
        for tracker in trainer.trackers:
            tracker.close()
    assert held["true"] < 0.7 * held["false"]
