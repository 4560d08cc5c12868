"""What a recipe sets to save memory is in its plan: frozen weights, half precision, parked encoders, limits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.models.text.base import TextStates
from frameloom.planner.costs import MetaDenoiser, measure_costs
from frameloom.planner.devices import DEVICES, choose_device
from frameloom.planner.estimate import RunPlan, plan_run
from frameloom.planner.models import build_meta_denoiser
from frameloom.planner.table import format_plan, plan_json
from frameloom.training.run.folder import RunFolder
from frameloom.training.train import build_trainer
from tests.checkpoint.saving import save_checkpoint
from tests.conftest import World
from tests.planner.measuring import record_peak

CELLS = (3, 8, 8)
HALF = ("--train.precision", "bf16", "--train.weights_precision", "bf16")
LORA = ("--lora", "{rank: 4, targets: [qkv]}")
FIRST = ("--optim.trainable", "[double_blocks.0]")
LEVERS = {
    "all": (),
    "some": FIRST,
    "all but some": ("--optim.frozen", "[single_blocks.0, final_layer]"),
    "lora": LORA,
    "half": HALF,
    "half of some": (*FIRST, *HALF),
    "lora on half": (*LORA, *HALF),
}


def load(*words: str) -> Recipe:
    return load_recipe("shapes/demo", ["--data.buckets", "{64px: {1: [1.0, 2]}}", *words])


def plan(*words: str, device: str = "4090") -> RunPlan:
    return plan_run(load(*words), DEVICES[device], 1, with_data=False)


def count_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("lever", LEVERS)
def test_weights_and_a_checkpoint_are_those_of_the_trainer(lever: str, world: World) -> None:
    recipe = world.recipe("--run.trackers", "[]", "--vae.overrides.latent_channels", "4", *LEVERS[lever])
    found = plan_run(recipe, DEVICES["cpu"], 1, with_data=False)
    trainer = build_trainer(recipe, RunFolder(world.folder / "run"), first_step=1)
    tensors, model = trainer.snapshot().tensors, trainer.task.model
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    masters = count_bytes(tensors.get("master", {}))
    assert found.size.trained == sum(weight.numel() for weight in trained)
    assert found.resident.weights == sum(weight.nbytes for weight in model.parameters()) + masters
    assert found.resident.ema == count_bytes(tensors["ema"])
    assert found.resident.optimizer == pytest.approx(count_bytes(tensors["optimizer"]), rel=0.01)
    # Beside parameters a model has small tables.
    assert found.checkpoint == pytest.approx(sum(map(count_bytes, tensors.values())), rel=0.02)


def test_weights_that_are_there_say_how_large_the_model_is(tmp_path: Path, world: World) -> None:
    """In an export and in a checkpoint of a run that goes on; a path where nothing is yet says nothing."""
    smaller = load("--model.overrides.mlp_ratio", "2")
    made = build_meta_denoiser(smaller)
    tensors = {name: torch.zeros(weight.shape) for name, weight in made.model.state_dict().items()}
    write_model_folder(
        tmp_path / "export", kind="denoiser", name="opensora2", config=dataclasses.asdict(made.config), tensors=tensors
    )
    wanted = plan_run(smaller, DEVICES["cpu"], 1, with_data=False).size.weights
    assert plan("--model.weights", str(tmp_path), device="cpu").size.weights == wanted
    absent = plan("--model.weights", str(tmp_path / "absent"), device="cpu").size.weights
    assert absent == plan(device="cpu").size.weights > wanted

    run = tmp_path / "run"
    narrow = world.recipe("--run.trackers", "[]", "--model.overrides.mlp_ratio", "2")
    trainer = build_trainer(narrow, RunFolder(run), first_step=1)
    saved = save_checkpoint(run / "checkpoints", trainer.snapshot())
    (run / "recipe.yaml").touch()
    trained = sum(weight.numel() for weight in trainer.task.model.parameters())
    for place in (run, saved):
        recipe = world.recipe("--model.weights", str(place))
        assert build_meta_denoiser(recipe).config.mlp_ratio == 2
        assert plan_run(recipe, DEVICES["cpu"], 1, with_data=False).size.weights == trained


@pytest.mark.parametrize("lever", ["some", "lora", "lora on half", "half"])
def test_a_pass_needs_what_is_planned(lever: str) -> None:
    words = ("--model.overrides", "{depth: 3, depth_single_blocks: 0, hidden_size: 192, num_heads: 6}")
    recipe = load(*words, *LEVERS[lever])
    shapes, real = build_meta_denoiser(recipe), build_meta_denoiser(recipe)
    real.model.to_empty(device="cpu")
    weights = sum(weight.nbytes for weight in real.model.parameters())
    gradients = sum(weight.nbytes for weight in real.model.parameters() if weight.requires_grad)
    bf16 = recipe.train.precision == "bf16"
    costs = measure_costs(shapes, [CELLS], bf16=bf16)
    measured = weights + record_peak(lambda: take_pass(real, bf16=bf16))
    predicted = weights + costs[CELLS].transient_bytes(2, gradients)
    assert predicted == pytest.approx(measured, rel=0.1)


def take_pass(denoiser: MetaDenoiser, *, bf16: bool) -> None:
    draw, text = stream(0, "pass"), denoiser.text
    states = TextStates(
        tokens_BKD=torch.randn(2, text.tokens, text.width, generator=draw),
        mask_BK=torch.ones(2, text.tokens, dtype=torch.bool),
        pooled_BD=torch.randn(2, text.pooled_width, generator=draw),
    )
    noisy_BCFHW = torch.randn(2, denoiser.latent_channels, *CELLS, generator=draw)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        made_BCFHW = denoiser.model(noisy_BCFHW, torch.rand(2, generator=draw), states.conditions())
    loss = nn.functional.mse_loss(made_BCFHW.float(), noisy_BCFHW)
    del made_BCFHW
    torch.autograd.backward(loss)


def test_what_a_frozen_part_saves_is_seen() -> None:
    whole, some = plan(), plan(*FIRST)
    assert 0 < some.size.trained < whole.size.trained == whole.size.weights == some.size.weights
    assert some.resident.gradients < whole.resident.gradients and some.resident.weights == whole.resident.weights
    assert some.buckets[0].flops < whole.buckets[0].flops and some.buckets[0].total < whole.buckets[0].total


def test_a_pattern_that_names_nothing_and_one_that_leaves_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optim.trainable has 'double_block.0'.*did you mean"):
        plan("--optim.trainable", "[double_block.0]")
    with pytest.raises(ConfigError, match="no weight trains"):
        plan("--optim.frozen", '["."]')


def test_parked_encoders_are_on_the_device_only_while_they_encode() -> None:
    words = ("--data.cache", "{}", "--train.recompute", "true")
    stay, parked = plan(*words), plan(*words, "--train.encoder_offload", "true")
    assert stay.resident.vae > 0 < stay.resident.text and parked.resident.vae == parked.resident.text == 0
    saved = {a.total - b.total for a, b in zip(stay.buckets, parked.buckets, strict=True)}
    # Either the denoiser's pass is the worst moment, or that of one encoder, while the other one is away.
    assert min(saved) >= min(stay.resident.vae, stay.resident.text)
    assert max(saved) <= stay.resident.vae + stay.resident.text
    # Where the device is the host, there is nowhere to park.
    assert plan(*words, "--train.encoder_offload", "true", device="cpu").resident == stay.resident


@pytest.mark.parametrize(("limit", "memory"), [("0.5", 12e9), ("6GiB", 6 * 2**30), ("23GB", 23e9), ("40GB", 24e9)])
def test_a_run_that_may_take_a_part_of_a_device_is_planned_for_it(limit: str, memory: float) -> None:
    words = ["--train.max_device_memory", limit]
    found = plan(*words)
    again = plan_run(load(*words), found.device, 1, with_data=False)
    assert found.device.memory == again.device.memory == memory
    assert "of 24 GB" in format_plan(found)[0]
    assert plan(*words, device="cpu").device == DEVICES["cpu"]


def test_the_rate_that_is_told_is_the_one_that_was_used() -> None:
    full, half, both = (
        plan(),
        plan("--train.precision", "bf16"),
        plan("--train.precision", "bf16", "--data.cache", "{}"),
    )
    told = ["\n".join(format_plan(found)) for found in (full, half, both)]
    assert "45% of 82 TFLOP/s (fp32) for" in told[0] and "45% of 165 TFLOP/s (bf16) for" in told[1]
    assert "45% of 165 TFLOP/s (bf16) and 82 TFLOP/s (fp32) for" in told[2]


def test_what_is_not_counted_is_told() -> None:
    found = plan("--train.recompute", "{offload: true}")
    assert "not counted: train.recompute.offload" in format_plan(found)
    assert plan_json(found)["not_counted"] == ["train.recompute.offload"] != plan_json(plan())["not_counted"]


@pytest.mark.parametrize(("memory", "told"), [("60MB", "60 MB"), ("1.5GB", "1.5 GB"), ("900kB", "900 kB")])
def test_memory_is_told_in_the_unit_that_fits(memory: str, told: str) -> None:
    assert choose_device("cpu", memory).format_memory() == told
