"""The models of a recipe without their weights: the denoiser in shapes only, and the sizes of what is beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frameloom.config.schema import Recipe, TextEncoderSection
from frameloom.core.errors import ConfigError
from frameloom.models.denoisers import DenoiserFamily, get_family
from frameloom.models.denoisers.base import override_fields
from frameloom.models.vaes import VideoVAE, get_vae
from frameloom.plan.costs import TextShape
from frameloom.plan.memory import ModelSize
from frameloom.train.recompute import apply_recompute

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class EncoderSize:
    """A published text encoder: width of its states, of its pooled vector, and number of its weights."""

    width: int
    pooled_width: int
    weights: float


_ENCODERS = {
    "minilm": EncoderSize(384, 384, 22.7e6),
    "t5": EncoderSize(4096, 0, 4.762e9),
    "mt5": EncoderSize(4096, 0, 5.655e9),
    "clip_l": EncoderSize(768, 768, 123.1e6),
    "clip_bigg": EncoderSize(1280, 1280, 694.7e6),
}


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


def encoder_size(section: TextEncoderSection) -> EncoderSize:
    """Of the folder that a recipe names if it is there, else of the published encoder."""
    known = _ENCODERS.get(section.name)
    if known is None:
        raise ConfigError(f"text.encoders: the planner does not know the size of '{section.name}'")
    file = Path(section.path or "") / "config.json"
    if section.path is None or not file.is_file():
        return known
    config = json.loads(file.read_text())
    width = int(config.get("d_model") or config.get("hidden_size") or known.width)
    share = (width / known.width) ** 2
    return EncoderSize(width, width if known.pooled_width else 0, known.weights * share)


def _build_vae(recipe: Recipe) -> VideoVAE:
    family = get_vae(recipe.vae.name)
    config = override_fields(family.sizes[recipe.vae.size], recipe.vae.overrides, where="vae.overrides")
    return family.build(config)


def _measure(recipe: Recipe, model: nn.Module, blocks: Sequence[nn.Module], vae: VideoVAE) -> ModelSize:
    num_weights = sum(weight.numel() for weight in model.parameters())
    vae_bytes = 4.0 * sum(weight.numel() for weight in vae.parameters()) if recipe.data.cache.latents is None else 0.0
    text_bytes = 0.0
    if recipe.data.cache.text is None:
        text_bytes = sum(encoder_size(item).weights * _BYTES[item.precision or "fp32"] for item in recipe.text.encoders)
    return ModelSize(
        weights=num_weights,
        trained=num_weights if recipe.lora is None else _adapter_weights(recipe, blocks),
        largest_block=max((sum(weight.numel() for weight in block.parameters()) for block in blocks), default=0),
        vae_bytes=vae_bytes,
        text_bytes=text_bytes,
    )


def _adapter_weights(recipe: Recipe, blocks: Sequence[nn.Module]) -> int:
    """Weights of adapters on every linear layer of the blocks: an upper bound where fewer are chosen."""
    assert recipe.lora is not None
    layers = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    return sum(recipe.lora.rank * (layer.in_features + layer.out_features) for layer in layers)
