"""A finished or running run folder, as something to sample from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from frameloom.checkpoint.store import Checkpoint, load_checkpoint, load_latest, step_folder
from frameloom.config.load import load_recipe
from frameloom.config.schema import Recipe
from frameloom.core.errors import CheckpointError, ConfigError, RunError
from frameloom.generate.lora import add_lora, check_base
from frameloom.generate.parts import (
    LoadedDenoiser,
    TextPipeline,
    build_denoiser,
    build_objective,
    build_text,
    build_vae,
    pick_device,
    rebuild_denoiser,
)
from frameloom.generate.pipeline import Sampler
from frameloom.models.lora import merge_adapters, to_adapters
from frameloom.models.text.scaling import TextScaling


def load_sampler(run: Path, overrides: Sequence[str] = (), *, step: int | None = None) -> Sampler:
    """A checkpoint of a denoiser run: the newest complete one, or that of `step`.

    `overrides` are dotted, as in `--sample.guidance 6`.
    """
    if not (run / "recipe.yaml").is_file():
        raise RunError(
            f"{run}: not a run folder (it has no recipe.yaml); name the folder that `frameloom train` printed"
        )
    recipe = load_recipe(run / "recipe.yaml", overrides)
    if recipe.task != "denoiser":
        raise ConfigError(f"{run}: is a run of task {recipe.task}; videos are sampled from a run of task denoiser")
    device = pick_device(recipe.train.device)
    vae = build_vae(recipe.vae, seed=recipe.seed).model.to(device).eval()
    text = build_text(recipe.text, recipe.model).to(device)
    folder = run / "checkpoints"
    checkpoint = load_latest(folder) if step is None else load_checkpoint(step_folder(folder, step))
    if checkpoint is None:
        raise CheckpointError(
            f"{run}: holds no complete checkpoint yet; train it first: frameloom train {run}/recipe.yaml"
        )
    denoiser = _load_denoiser(run, recipe, checkpoint, latent_channels=vae.latent_channels, text=text)
    denoiser.model.to(device).eval()
    origin = {"run": recipe.name, "step": str(checkpoint.step)}
    scaling = TextScaling.from_tensors(checkpoint.tensors.get("text_scaling"))
    return Sampler(
        denoiser=denoiser,
        vae=vae,
        text=text,
        scaling=None if scaling is None else scaling.to(device),
        objective=build_objective(recipe.objective),
        settings=recipe.sample,
        origin=origin,
        device=device,
    )


def _load_denoiser(
    run: Path, recipe: Recipe, checkpoint: Checkpoint, *, latent_channels: int, text: TextPipeline
) -> LoadedDenoiser:
    """The model of a checkpoint; adapters, the run's own and `sample.lora`, are added into its weights."""
    tensors, lora, strength = checkpoint.tensors["model"], checkpoint.state.get("lora"), recipe.sample.lora_scale
    if recipe.sample.weights == "ema":
        if "ema" not in checkpoint.tensors:
            raise CheckpointError(f"{run}: was trained without averaged weights; sample with --weights raw")
        tensors = {**tensors, **checkpoint.tensors["ema"]}
    if lora is None:
        denoiser = rebuild_denoiser(recipe.model.family, checkpoint.state["architecture"], tensors)
    else:
        denoiser = build_denoiser(recipe.model, latent_channels=latent_channels, text=text, seed=recipe.seed)
        check_base(denoiser, lora, weights=recipe.model.weights, where=f"{run}: step {checkpoint.step}")
        merge_adapters(denoiser.model, to_adapters(tensors, alpha=lora["alpha"]), strength=strength)
    if recipe.sample.lora is not None:
        add_lora(denoiser, Path(recipe.sample.lora), strength=strength)
    return denoiser
