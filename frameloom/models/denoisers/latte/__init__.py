"""LatteT2V of Open-Sora-Plan 1.1. See README.md in this folder."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.models.denoisers.base import (
    NOTHING,
    Conditions,
    DenoiserFamily,
    TextStates,
    find_index,
    refuse_foreign,
)
from frameloom.models.denoisers.latte.config import SIZES, WHERE, LatteConfig, configure
from frameloom.models.denoisers.latte.model import build
from frameloom.models.denoisers.latte.sharding import BLOCK_LISTS
from frameloom.models.denoisers.latte.weights import load_original
from frameloom.models.layers.patches import token_grid
from frameloom.models.layers.sequence_parallel import Exchange

__all__ = ["FAMILY"]


def _num_tokens(config: LatteConfig, latent_FHW: tuple[int, int, int]) -> int:
    return math.prod(token_grid(latent_FHW, config.patch_size, where=WHERE))


def _denoise(
    model: nn.Module, noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates, given: Conditions = NOTHING
) -> Tensor:
    """The predicted noise; a model that also predicts the variance gives it in the channels left out here.

    `text.pooled_BD` is not used. With `image_text`, the last frames of the latent are single images.
    """
    refuse_foreign(given, FAMILY.name, known=("cells_BFHW", "image_text", "dropout"))
    tokens_BSKD, mask_BSK = _join_captions(text, given.image_text)
    index_B = find_index(timestep_B)
    prediction = cast(Tensor, model(noisy_BCFHW, index_B, tokens_BSKD, mask_BSK, given.cells_BFHW, given.dropout))
    return prediction[:, : noisy_BCFHW.shape[1]].to(noisy_BCFHW.dtype)


def _join_captions(text: TextStates, images: TextStates | None) -> tuple[Tensor, Tensor]:
    """[B, S, K, D] and its mask: the caption of the clip, then those of its images."""
    tokens, mask = text.tokens_BKD, text.mask_BK
    if images is None:
        return tokens[:, None], mask[:, None]
    num_images, rest = divmod(len(images.tokens_BKD), len(tokens))
    if rest or images.tokens_BKD.shape[1:] != tokens.shape[1:]:
        raise ConfigError(
            f"{WHERE}: image captions of shape {tuple(images.tokens_BKD.shape)} beside clip captions of shape "
            f"{tuple(tokens.shape)}; give the same number of images for each clip, encoded to the same length"
        )
    of_images, image_mask = (
        torch.unflatten(part, 0, (len(tokens), num_images)) for part in (images.tokens_BKD, images.mask_BK)
    )
    return torch.cat([tokens[:, None], of_images], dim=1), torch.cat([mask[:, None], image_mask], dim=1)


def _exchanges(config: LatteConfig, latent_FHW: tuple[int, int, int], num_text: int, degree: int) -> list[Exchange]:
    """Only pictures are divided; where neighbours are joined, by whole rows, as many as are joined or a multiple."""
    frames, rows, columns = token_grid(latent_FHW, config.patch_size, where=WHERE)
    factor = config.compress_kv_factor
    if factor > 1:
        joined_rows = -(-rows // (factor * degree)) * degree
        rows, keys = joined_rows * factor, joined_rows * (columns // factor)
    whole = Exchange(rows * columns, config.hidden_size, sequences=frames)
    return [
        replace(whole, keys=keys) if factor > 1 and config.compresses(layer) else whole
        for layer in range(config.num_layers)
    ]


def _blocks(model: nn.Module) -> list[nn.Module]:
    lists = [cast(nn.ModuleList, getattr(model, name)) for name in BLOCK_LISTS]
    return [block for pair in zip(*lists, strict=True) for block in pair]


FAMILY = DenoiserFamily(
    name="latte",
    config_class=LatteConfig,
    sizes=SIZES,
    configure=configure,
    build=build,
    patch=lambda config: (1, config.patch_size, config.patch_size),
    denoise=_denoise,
    blocks=_blocks,
    load_original=load_original,
    num_tokens=_num_tokens,
    num_heads=lambda config: config.num_attention_heads,
    exchanges=_exchanges,
    images_skip=True,
    lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
)
