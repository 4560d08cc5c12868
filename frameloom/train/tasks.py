"""From a recipe to the task that the loop trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from frameloom.config.facts import FAMILIES
from frameloom.config.schema import Recipe, TrainSection
from frameloom.data.batch import Batch
from frameloom.generate.parts import TextPipeline, build_denoiser, build_objective, build_text, build_vae
from frameloom.models.text.scaling import TextScaling, measure_scaling
from frameloom.train.autoencoder import AutoencoderTask
from frameloom.train.compiling import apply_compile
from frameloom.train.conditions import ConditionMaker
from frameloom.train.denoiser import DenoiserTask
from frameloom.train.lora import Adapters, build_adapters
from frameloom.train.recompute import apply_recompute
from frameloom.train.step import Task


class TrainTask(Task, Protocol):
    """What a task offers to the loop beyond the losses of a step."""

    def validate(self, batches: Sequence[Batch]) -> dict[str, float]: ...
    def count_tokens(self, batch: Batch) -> int: ...


@dataclass(frozen=True)
class BuiltTask:
    """A task and how it is exported; `export_config` may measure the trained model on the batches it is given."""

    task: TrainTask
    kind: str
    name: str
    config: Any
    export_config: Callable[[Sequence[Batch]], Any]
    extra: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """constant tensors that a checkpoint must hold besides the weights"""
    adapters: Adapters | None = None
    """what trains beside a frozen model (LoRA); checkpoints and exports then hold only these"""


def build_task(recipe: Recipe, captions: Sequence[str], device: torch.device) -> BuiltTask:
    """`captions` are those of the training set, for what is measured on them."""
    if recipe.task == "autoencoder":
        return _build_autoencoder(recipe, device)
    return _build_denoiser(recipe, captions, device)


def _build_autoencoder(recipe: Recipe, device: torch.device) -> BuiltTask:
    vae = build_vae(recipe.vae, seed=recipe.seed)
    task = AutoencoderTask(vae.model.to(device).train(), recipe.autoencoder, recipe.seed, device)
    _apply_settings(vae.model, vae.model.blocks(), recipe.train, device)

    def config_with_scale(batches: Sequence[Batch]) -> Any:
        return dataclasses.replace(vae.config, **task.measure_latents(batches))

    return BuiltTask(task, "vae", vae.name, vae.config, config_with_scale)


def _build_denoiser(recipe: Recipe, captions: Sequence[str], device: torch.device) -> BuiltTask:
    vae = build_vae(recipe.vae, seed=recipe.seed).model.to(device).eval().requires_grad_(False)
    text = build_text(recipe.text, recipe.model).to(device)
    denoiser = build_denoiser(recipe.model, latent_channels=vae.latent_channels, text=text, seed=recipe.seed)
    weights = recipe.model.weights
    adapters = build_adapters(recipe.lora, denoiser, weights=weights, seed=recipe.seed) if recipe.lora else None
    denoiser.model.to(device).train()
    _apply_settings(denoiser.model, denoiser.family.blocks(denoiser.model), recipe.train, device)
    conditions = ConditionMaker(
        denoiser=denoiser,
        vae=vae,
        known=recipe.known,
        takes_sizes="sizes" in FAMILIES[recipe.model.family].takes,
        device=device,
    )
    task = DenoiserTask(
        denoiser=denoiser,
        vae=vae,
        text=text,
        objective=build_objective(recipe.objective),
        null_text=text.encode([""]).to(device),
        scaling=_measure_text(text, captions).to(device) if recipe.text.rescale else None,
        conditions=conditions,
        caption_dropout=recipe.text.dropout,
        independent_dropout=recipe.text.independent_dropout,
        seed=recipe.seed,
        device=device,
        **({"num_levels": recipe.validation.levels} if recipe.validation else {}),
    )
    extra = {"text_scaling": task.scaling.tensors()} if task.scaling is not None else {}
    config = denoiser.config
    return BuiltTask(task, "denoiser", recipe.model.family, config, lambda batches: config, extra, adapters)


def _apply_settings(
    model: nn.Module, blocks: Sequence[nn.Module], settings: TrainSection, device: torch.device
) -> None:
    """In this order: what is recomputed is the compiled block."""
    apply_compile(blocks, settings.compile, device)
    apply_recompute(model, blocks, settings.recompute, device)


def _measure_text(text: TextPipeline, captions: Sequence[str], most: int = 4096) -> TextScaling:
    """The scaling of a set from its different captions, evenly picked where there are very many."""
    different = sorted(set(captions))
    return measure_scaling(text.encode(different[:: -(-len(different) // most)]))
