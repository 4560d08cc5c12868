"""The models of a recipe on the meta device, and how large they and their text encoders are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frameloom.builders.denoiser import configure_denoiser
from frameloom.builders.vae import configure_vae
from frameloom.checkpoint.model_folder import Architecture, read_architecture
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError
from frameloom.models.lora.adapters import add_adapters, choose_layers, default_layers
from frameloom.models.precision import DTYPES, Precision
from frameloom.models.registry import get_denoiser, get_vae
from frameloom.models.vaes.base import VideoVAE
from frameloom.planner.costs import MetaDenoiser, TextShape
from frameloom.planner.encoders import CaptionCost, caption_cost, encoder_size, precision_of, weight_bytes
from frameloom.planner.parallel import ModelSize
from frameloom.training.memory.recompute import apply_recompute
from frameloom.training.optim.groups import freeze_parameters


def build_meta_denoiser(recipe: Recipe) -> MetaDenoiser:
    """The denoiser in shapes, with its adapters, its recompute and what of it is frozen, as the trainer makes it.

    Weights named in the recipe need not be there; where they are, they say how large it is.
    """
    if recipe.task != "denoiser":
        raise ConfigError(f"task {recipe.task}: only runs of task denoiser can be planned")
    family = get_denoiser(recipe.model.family)
    text = text_shape(recipe, family.text_join)
    latent_channels = _configure_vae(recipe).latent_channels
    config = configure_denoiser(
        recipe.model,
        _read_stored(recipe.model.weights),
        latent_channels=latent_channels,
        text_width=text.width,
        pooled_width=text.pooled_width,
    )
    with torch.device("meta"):
        model = family.build(config)
    model.train()
    if (lora := recipe.lora) is not None:
        if lora.targets is None:
            chosen = default_layers(model, family.lora_targets, model.blocks())
        else:
            chosen = choose_layers(model, lora.targets, where="lora.targets")
        add_adapters(model, chosen, rank=lora.rank, alpha=1.0, generator=torch.Generator())
    if recipe.train.weights_precision != "fp32":
        # The passes are in bf16 here, which takes as many bytes as fp16.
        adapters = [weight for weight in model.parameters() if weight.requires_grad] if recipe.lora else ()
        Precision(weights="bf16").cast_trained(model, keep=adapters)
    apply_recompute(model, model.blocks(), recipe.train.recompute, torch.device("meta"))
    if recipe.inversion is None:
        freeze_parameters(model, recipe.optim.trainable, recipe.optim.frozen)
        if not any(weight.requires_grad for weight in model.parameters()):
            raise ConfigError("optim.frozen: with it no weight trains; remove some of its patterns")
    return MetaDenoiser(family, model, config, text, latent_channels)


def build_meta_vae(recipe: Recipe) -> VideoVAE:
    with torch.device("meta"):
        return get_vae(recipe.vae.name).build(_configure_vae(recipe))


def _configure_vae(recipe: Recipe) -> Any:
    return configure_vae(recipe.vae, _read_stored(recipe.vae.weights))


def _read_stored(weights: str | None) -> Architecture | None:
    return read_architecture(Path(weights)) if weights and Path(weights).exists() else None


def text_shape(recipe: Recipe, join: str) -> TextShape:
    encoders = recipe.text.encoders
    sizes = [encoder_size(item) for item in encoders]
    pooled = [size.pooled_width for size in sizes if size.pooled_width]
    width = sum(size.width for size in sizes) if join == "concat" else sizes[0].width
    return TextShape(encoders[0].max_length or 77, width, pooled[-1] if pooled else 0)


def list_caption_costs(recipe: Recipe, join: str) -> list[CaptionCost]:
    """Of the encoders that run in a step: those of the token states, and the last one with a pooled vector."""
    if recipe.data.cache.text is not None:
        return []
    encoders = recipe.text.encoders
    words = range(len(encoders)) if join == "concat" else range(1)
    pooling = [index for index, item in enumerate(encoders) if encoder_size(item).pooled_width][-1:]
    return [caption_cost(encoders[index]) for index in sorted({*words, *pooling})]


def list_precisions(recipe: Recipe) -> list[str]:
    """Of the denoiser's passes, and of the encoders that run in a step."""
    cache = recipe.data.cache
    found = [recipe.train.precision, *([] if cache.latents else [recipe.vae.precision])]
    return list(dict.fromkeys([*found, *([] if cache.text else map(precision_of, recipe.text.encoders))]))


def list_uncounted(recipe: Recipe) -> list[str]:
    """Keys that cost memory or time, or save it, of which a plan knows nothing."""
    recompute = recipe.train.recompute
    reasons = {
        "data.use_image_num": recipe.data.use_image_num > 0,
        "inversion": recipe.inversion is not None,
        "train.recompute.offload": not isinstance(recompute, bool) and recompute.offload,
        **{f"text.encoders.{index}.train": item.train for index, item in enumerate(recipe.text.encoders)},
    }
    return [key for key, is_set in reasons.items() if is_set]


def measure_size(recipe: Recipe, denoiser: MetaDenoiser, vae: VideoVAE) -> ModelSize:
    weights, cache = list(denoiser.model.parameters()), recipe.data.cache
    trained = [weight for weight in weights if weight.requires_grad]
    return ModelSize(
        weights=_count(weights),
        trained=_count(trained),
        largest_block=max((_count(block.parameters()) for block in denoiser.model.blocks()), default=0),
        weight_bytes=_count_bytes(weights),
        master_bytes=4.0 * _count(weight for weight in trained if weight.dtype != torch.float32),
        saved_bytes=_count_bytes(weights if recipe.lora is None else trained),
        vae_bytes=0.0 if cache.latents else float(DTYPES[recipe.vae.precision].itemsize * _count(vae.parameters())),
        text_bytes=0.0 if cache.text else weight_bytes(recipe.text.encoders),
    )


def _count(weights: Iterable[nn.Parameter]) -> int:
    return sum(weight.numel() for weight in weights)


def _count_bytes(weights: Iterable[nn.Parameter]) -> float:
    return float(sum(weight.numel() * weight.dtype.itemsize for weight in weights))
