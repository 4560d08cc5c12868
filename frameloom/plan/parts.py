"""The models of a recipe without their weights: the denoiser in shapes only, and the sizes of what is beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from frameloom.config.facts import VAES, VAEFacts
from frameloom.config.schema import Recipe
from frameloom.core.errors import ConfigError
from frameloom.data.buckets import Bucket
from frameloom.models.denoisers import DenoiserFamily, get_family
from frameloom.models.denoisers.base import override_fields
from frameloom.models.vaes import VideoVAE, get_vae
from frameloom.plan.costs import TextShape
from frameloom.plan.fitting import Shape
from frameloom.plan.memory import ModelSize
from frameloom.plan.text import NUMBER_BYTES, CaptionCost, caption_cost, encoder_size, weight_bytes
from frameloom.train.recompute import apply_recompute


@dataclass(frozen=True)
class MetaDenoiser:
    """With what its inputs follow from: `vae` are the facts of the autoencoder, `latent_channels` its output."""

    family: DenoiserFamily
    model: nn.Module
    config: Any
    text: TextShape
    vae: VAEFacts
    latent_channels: int

    def latent_shape(self, bucket: Bucket) -> Shape:
        stride, height, width = self.vae.strides
        lead = int(self.vae.causal)
        frames = max(1, (bucket.frames - lead) // stride + lead)
        return frames, bucket.height // height, bucket.width // width


def build_meta_denoiser(recipe: Recipe) -> MetaDenoiser:
    """The denoiser in shapes, with its recompute; weights named in the recipe need not be there."""
    if recipe.task != "denoiser":
        raise ConfigError(f"task {recipe.task}: only runs of task denoiser can be planned")
    family = get_family(recipe.model.family)
    text = text_shape(recipe, family.text_join)
    latent_channels = _configure_vae(recipe).latent_channels
    config = family.configure(
        recipe.model.size,
        latent_channels=latent_channels,
        text_width=text.width,
        pooled_width=text.pooled_width,
        overrides=recipe.model.overrides,
    )
    with torch.device("meta"):
        model = family.build(config)
    model.train()
    apply_recompute(model, family.blocks(model), recipe.train.recompute, torch.device("meta"))
    return MetaDenoiser(family, model, config, text, VAES[recipe.vae.name], latent_channels)


def build_meta_vae(recipe: Recipe) -> VideoVAE:
    with torch.device("meta"):
        return get_vae(recipe.vae.name).build(_configure_vae(recipe))


def _configure_vae(recipe: Recipe) -> Any:
    sizes = get_vae(recipe.vae.name).sizes
    return override_fields(sizes[recipe.vae.size], recipe.vae.overrides, where="vae.overrides")


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


def measure_size(recipe: Recipe, denoiser: MetaDenoiser, vae: VideoVAE) -> ModelSize:
    model, blocks = denoiser.model, denoiser.family.blocks(denoiser.model)
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
