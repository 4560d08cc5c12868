"""The models of a recipe without their weights: the denoiser in shapes only, and the sizes of what is beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from frameloom.config.schema import Recipe
from frameloom.core.errors import ConfigError
from frameloom.models.denoisers import DenoiserFamily, get_family
from frameloom.models.denoisers.base import override_fields
from frameloom.models.vaes import VideoVAE, get_vae
from frameloom.plan.costs import TextShape
from frameloom.plan.memory import ModelSize
from frameloom.plan.text import NUMBER_BYTES, CaptionCost, caption_cost, encoder_size, weight_bytes
from frameloom.train.recompute import apply_recompute


@dataclass(frozen=True)
class MetaParts:
    family: DenoiserFamily
    model: nn.Module
    config: Any
    vae: VideoVAE
    text: TextShape
    size: ModelSize


def build_meta_parts(recipe: Recipe) -> MetaParts:
    """All of a denoiser recipe in shapes; weights named in it need not be there."""
    if recipe.task != "denoiser":
        raise ConfigError(f"task {recipe.task}: only runs of task denoiser can be planned")
    family = get_family(recipe.model.family)
    text = text_shape(recipe, family.text_join)
    with torch.device("meta"):
        vae = _build_vae(recipe)
        config = family.configure(
            recipe.model.size,
            latent_channels=vae.latent_channels,
            text_width=text.width,
            pooled_width=text.pooled_width,
            overrides=recipe.model.overrides,
        )
        model = family.build(config)
    model.train()
    blocks = family.blocks(model)
    size = _measure(recipe, model, blocks, vae)
    apply_recompute(model, blocks, recipe.train.recompute, torch.device("meta"))
    return MetaParts(family, model, config, vae, text, size)


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


def _build_vae(recipe: Recipe) -> VideoVAE:
    family = get_vae(recipe.vae.name)
    config = override_fields(family.sizes[recipe.vae.size], recipe.vae.overrides, where="vae.overrides")
    return family.build(config)


def _measure(recipe: Recipe, model: nn.Module, blocks: Sequence[nn.Module], vae: VideoVAE) -> ModelSize:
    num_weights = sum(weight.numel() for weight in model.parameters())
    cache = recipe.data.cache
    vae_weights = sum(weight.numel() for weight in vae.parameters())
    return ModelSize(
        weights=num_weights,
        trained=num_weights if recipe.lora is None else _adapter_weights(recipe, blocks),
        largest_block=max((sum(weight.numel() for weight in block.parameters()) for block in blocks), default=0),
        vae_bytes=0.0 if cache.latents else float(NUMBER_BYTES[recipe.vae.precision] * vae_weights),
        text_bytes=0.0 if cache.text else weight_bytes(recipe.text.encoders),
    )


def _adapter_weights(recipe: Recipe, blocks: Sequence[nn.Module]) -> int:
    """Weights of adapters on every linear layer of the blocks: an upper bound where fewer are chosen."""
    assert recipe.lora is not None
    layers = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    return sum(recipe.lora.rank * (layer.in_features + layer.out_features) for layer in layers)
