"""Adapters through the real trainer: only they train and are saved, resume is exact, and runs can be sampled."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frameloom.builders.denoiser import build_denoiser
from frameloom.builders.lora import DIFFUSERS_FILE, KOHYA_FILE, read_lora
from frameloom.builders.text import build_text
from frameloom.builders.vae import build_vae
from frameloom.checkpoint.model_folder import read_weights, write_model_folder
from frameloom.checkpoint.reader import load_latest, read_state, step_folder
from frameloom.config.rules.check import check_files
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.sampling.load import load_model
from frameloom.training.loop import Trainer
from frameloom.training.run.resuming import ResumeChoices
from frameloom.training.task import StepContext
from frameloom.training.train import train
from tests.training.runs import losses, open_trainer

LORA = {"rank": 4, "alpha": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "opensora2": {},
    "cogvideox_fun": {"model": {"_delete_": True, "family": "cogvideox_fun"}, "objective": {"kind": "v"}},
    "sdxl": {
        "model": {"_delete_": True, "family": "sdxl"},
        "objective": {"kind": "epsilon"},
        "data": {"buckets": {"_delete_": True, "64px": {"1": [1.0, 4]}}},
        "sample": {"frames": 1},
    },
    "latte": {"model": {"_delete_": True, "family": "latte"}, "objective": {"kind": "v"}},
    "opensora_plan": {"model": {"_delete_": True, "family": "opensora_plan"}, "objective": {"kind": "v"}},
}
PROMPT = "a red circle"


def with_base(world, case: str = "opensora2", *, seed: int = 0, name: str = "base", **sections: Any) -> dict[str, Any]:
    """The sections of a recipe for LoRA beside weights that were written to a model folder, zero nowhere."""
    values = {**FAMILIES[case], "lora": LORA, **sections}
    recipe = world.recipe(**values)
    vae = build_vae(recipe.vae, seed=0).model
    denoiser = build_denoiser(
        recipe.model, latent_channels=vae.latent_channels, text=build_text(recipe.text, recipe.model), seed=seed
    )
    draws = torch.Generator().manual_seed(seed)
    tensors = {
        key: value + 0.02 * torch.randn(value.shape, generator=draws)
        for key, value in denoiser.model.state_dict().items()
    }
    config, folder = dataclasses.asdict(denoiser.config), world.folder / name
    write_model_folder(folder, kind="denoiser", name=recipe.model.family, config=config, tensors=tensors)
    return {**values, "model": {**values.get("model", {}), "weights": str(folder)}}


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = load_latest(run / "checkpoints")
    assert checkpoint is not None
    return checkpoint.tensors["model"]


def make_trainer(world, name: str, **sections: Any) -> Trainer:
    return open_trainer(world.recipe("--name", name, **sections), world.folder / name)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_a_lora_trains_resumes_to_the_bit_exports_and_samples(world, case: str) -> None:
    options = ("--train.recompute", "true", "--train.accumulate", "2", "--train.precision", "bf16")
    sections = with_base(world, case)
    whole = train(world.recipe("--name", "whole", "--train.steps", "2", *options, **sections))
    train(world.recipe("--name", "parts", "--train.steps", "1", *options, **sections))
    parts = train(world.recipe("--name", "parts", "--train.steps", "2", *options, **sections))
    assert losses(whole) == losses(parts) and len(losses(whole)) == 2
    ours, again = weights_of(whole), weights_of(parts)
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    other = train(world.recipe("--name", "other", "--train.steps", "1", "--seed", "43", *options, **sections))
    assert losses(other) != losses(whole)[:1]
    exported = {name: load_file(whole / "export" / name) for name in (KOHYA_FILE, DIFFUSERS_FILE)}
    assert len(exported[KOHYA_FILE]) == 3 * len(ours) // 2 and len(exported[DIFFUSERS_FILE]) == len(ours)
    few = ["--sample.steps", "2", "--sample.guidance", "2"]
    sampler = load_model(whole, few)
    result = sampler.sample(PROMPT, seed=1)
    assert result.frames.shape == (sampler.settings.frames, 64, 64, 3)


def test_only_adapters_train_and_are_saved(world) -> None:
    sections = with_base(world)
    trainer = make_trainer(world, "run", **sections)
    model = trainer.task.model
    frozen = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
    batches, _ = next(iter(trainer.feed.steps(0, 0, 1)))
    for _ in range(3):
        trainer.take_step(batches)
    checkpoint = trainer.snapshot()
    names = set(checkpoint.tensors["model"])
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    assert set(checkpoint.tensors["ema"]) == names
    assert {name.partition(".")[2] for name in checkpoint.tensors["optimizer"]} == names
    assert all(torch.equal(value, dict(model.named_parameters())[name]) for name, value in frozen.items())
    assert all(checkpoint.tensors["model"][name].any() for name in names)


def test_the_first_loss_is_that_of_the_base_and_training_moves_it(world) -> None:
    sections = with_base(world)
    adapted, plain = make_trainer(world, "run", **sections), make_trainer(world, "plain", **{**sections, "lora": None})
    batches, _ = next(iter(adapted.feed.steps(0, 0, 1)))
    # Listened to, a layer is called by itself, as one with an adapter is: fused with others it rounds otherwise.
    layers = [name for name, layer in adapted.task.model.named_modules() if hasattr(layer, "base_layer")]
    assert layers
    for name in layers:
        plain.task.model.get_submodule(name).register_forward_hook(lambda *_: None)
    with torch.no_grad():
        first, base = (one.task.losses(StepContext(0), batches[0])[0] for one in (adapted, plain))
    assert torch.equal(first, base)
    for _ in range(3):
        adapted.take_step(batches)
    with torch.no_grad():
        assert not torch.equal(adapted.task.losses(StepContext(0), batches[0])[0], base)


def test_sampling_adds_the_adapters_with_a_strength(world) -> None:
    sections = with_base(world)
    run = train(world.recipe("--optim.lr", "0.02", **sections))
    few = ["--sample.steps", "2", "--sample.guidance", "1"]

    def sample(*overrides: str, step: int | None = None) -> torch.Tensor:
        sampler = load_model(run, [*few, *overrides], step=step)
        return torch.from_numpy(sampler.sample(PROMPT, seed=1).frames)

    full, none = sample(), sample("--sample.lora_scale", "0")
    assert not torch.equal(full, none) and not torch.equal(full, sample("--sample.lora_scale", "0.5"))
    plain = train(world.recipe("--name", "plain", **{**sections, "lora": None}, train={"steps": 2, "keep": 9}))
    base = load_model(plain, few, step=0)
    assert torch.equal(torch.from_numpy(base.sample(PROMPT, seed=1).frames), none)
    for name in (DIFFUSERS_FILE, KOHYA_FILE):
        added = load_model(plain, [*few, "--sample.lora", str(run / "export" / name)], step=0)
        assert torch.equal(torch.from_numpy(added.sample(PROMPT, seed=1).frames), full)


def test_a_run_starts_from_a_lora_of_either_layout(world) -> None:
    sections = with_base(world)
    first = train(world.recipe("--name", "first", "--train.ema", "null", **sections))
    trained = weights_of(first)
    for start in (first, first / "export", first / "export" / KOHYA_FILE):
        trainer = make_trainer(world, f"from-{start.name}", **{**sections, "lora": {**LORA, "weights": str(start)}})
        own = trainer.snapshot().tensors["model"]
        assert own.keys() == trained.keys() and all(torch.equal(own[name], trained[name]) for name in own)
    fresh = make_trainer(world, "fresh", **sections).snapshot().tensors["model"]
    assert not all(torch.equal(fresh[name], trained[name]) for name in fresh)


def test_a_start_that_differs_from_the_recipe_is_refused(world) -> None:
    sections = with_base(world)
    first = train(world.recipe("--name", "first", "--train.steps", "1", **sections))
    cases = (
        ({"rank": 8}, "has rank 4, but lora.rank is 8"),
        ({"alpha": 4}, "has alpha 2, but lora.alpha is 4"),
        ({"targets": ["img_attn.*"]}, r"of its layers are not in lora.targets \("),
        ({"targets": ["*"]}, r"layers of lora.targets are not in it \("),
    )
    for number, (change, words) in enumerate(cases):
        lora = {**LORA, "weights": str(first), **change}
        with pytest.raises(ConfigError, match=words):
            make_trainer(world, f"other-{number}", **{**sections, "lora": lora})


def test_other_base_weights_are_refused(world) -> None:
    sections = with_base(world)
    run = train(world.recipe("--train.steps", "2", **sections))
    assert read_state(step_folder(run / "checkpoints", 2))["lora"]["weights"] == str(world.folder / "base")
    other = with_base(world, seed=5, name="other")
    with pytest.raises(CheckpointError, match=r"trained beside '.*base' \(digest .*the model has '.*other'"):
        train(world.recipe("--train.steps", "4", **other), ResumeChoices(accept_recipe_change=True))
    with pytest.raises(CheckpointError, match="trained beside"):
        load_model(run, ["--model.weights", str(world.folder / "other")])
    moved = world.folder / "moved"
    (world.folder / "base").rename(moved)
    load_model(run, ["--model.weights", str(moved)])


def test_switched_or_changed_adapters_are_refused_on_resume(world) -> None:
    sections = with_base(world)
    train(world.recipe("--train.steps", "2", **sections))
    for change, words in (
        (None, "was trained with lora"),
        ({**LORA, "rank": 2}, "has lora.rank 4, the recipe 2"),
        ({**LORA, "alpha": 4}, "has lora.alpha 2, the recipe 4"),
        ({**LORA, "targets": ["*"]}, r"does not fit the model: \d+ missing"),
    ):
        with pytest.raises(CheckpointError, match=words):
            changed = world.recipe("--train.steps", "4", **{**sections, "lora": change})
            train(changed, ResumeChoices(accept_recipe_change=True))


def test_a_target_that_matches_nothing_names_the_nearest(world) -> None:
    sections = with_base(world, lora={**LORA, "targets": ["img_atn.qkv"]})
    with pytest.raises(ConfigError, match=r"lora.targets: 'img_atn.qkv' matches no layer.*'img_attn.qkv'"):
        train(world.recipe(**sections))


def test_fresh_base_weights_are_only_warned_of(world, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="frameloom"):
        trainer = make_trainer(world, "run", lora=LORA)
    assert "model.weights is null" in caplog.text
    assert trainer.task.part is not None


def test_a_lora_is_no_model_and_a_model_is_no_lora(world) -> None:
    sections = with_base(world)
    run = train(world.recipe("--train.steps", "1", **sections))
    with pytest.raises(CheckpointError, match=r"holds a LoRA, not a whole model; name it in lora.weights"):
        read_weights(run, kind="denoiser")
    trainer = make_trainer(world, "plain", **{**sections, "lora": None})
    denoiser = trainer.task.denoiser  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="holds a whole denoiser, not a LoRA"):
        read_lora(world.folder / "base", denoiser)
    assert len(read_lora(run, denoiser)) == len(weights_of(run)) // 2
    damaged = run / "export" / DIFFUSERS_FILE
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="missing or damaged"):
        read_lora(run, denoiser)


def test_a_foreign_file_that_does_not_fit_is_refused_with_a_list(world) -> None:
    sections = with_base(world)
    file = world.folder / "foreign.safetensors"
    save_file({"transformer.blocks.7.to_q.lora_A.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(CheckpointError, match=r"1 of 1 keys belong to no linear layer \(transformer.blocks.7.to_q"):
        train(world.recipe(**{**sections, "lora": {**LORA, "weights": str(file)}}))
    with pytest.raises(ConfigError, match=r"lora.weights is '.*nowhere', which does not exist"):
        check_files(world.recipe(**{**sections, "lora": {**LORA, "weights": str(world.folder / "nowhere")}}))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lora": {"rank": 0}}, "lora.rank is 0"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout is 0.1, but a run that resumes"),
        ({"lora": {"targets": []}}, "lora.targets"),
        ({"sample": {"lora_scale": 0.5}}, "sample.lora_scale is 0.5, but there is no LoRA"),
    ],
)
def test_mistakes_in_the_section_are_refused(world, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        world.recipe(**sections)


def test_an_autoencoder_has_no_lora(world) -> None:
    with pytest.raises(ConfigError, match=r"lora is set, but task is autoencoder"):
        world.recipe(task="autoencoder", lora=LORA)
