"""CogVideoX-Fun (2b, 5b, V1.5): text to video, inpaint and control. See README.md in this folder."""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor, nn

from frameloom.models.denoisers.base import (
    NOTHING,
    Conditions,
    DenoiserFamily,
    TextStates,
    find_index,
    list_blocks,
    refuse_foreign,
)
from frameloom.models.denoisers.cogvideox_fun.config import FAMILY_NAME, SIZES, CogVideoXFunConfig, configure
from frameloom.models.denoisers.cogvideox_fun.known import draw_known
from frameloom.models.denoisers.cogvideox_fun.model import build
from frameloom.models.denoisers.cogvideox_fun.positions import find_grid
from frameloom.models.denoisers.cogvideox_fun.sharding import BLOCK_LISTS
from frameloom.models.denoisers.cogvideox_fun.weights import load_original
from frameloom.models.layers.sequence_parallel import Exchange
from frameloom.models.lora_keys import LoraNames

__all__ = ["FAMILY"]


def _num_tokens(config: CogVideoXFunConfig, latent_FHW: tuple[int, int, int]) -> int:
    return math.prod(find_grid(config, latent_FHW))


def _exchanges(
    config: CogVideoXFunConfig, latent_FHW: tuple[int, int, int], num_text: int, degree: int
) -> list[Exchange]:
    return [Exchange(num_text + _num_tokens(config, latent_FHW), config.width)] * config.num_layers


def _denoise(
    model: nn.Module, noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates, given: Conditions = NOTHING
) -> Tensor:
    """`text.mask_BK` is not used: as in the original, padding is attended to. There is no pooled text."""
    config = cast(CogVideoXFunConfig, model.config)
    refuse_foreign(given, FAMILY.name, known=("dropout", *(("beside_BCFHW",) if config.beside_channels else ())))
    index_B = find_index(timestep_B)
    return cast(Tensor, model(noisy_BCFHW, index_B, text.tokens_BKD, given.beside_BCFHW, given.dropout))


FAMILY = DenoiserFamily(
    name=FAMILY_NAME,
    config_class=CogVideoXFunConfig,
    sizes=SIZES,
    configure=configure,
    build=build,
    patch=lambda config: (config.patch_size_t, config.patch_size, config.patch_size),
    denoise=_denoise,
    blocks=lambda model: list_blocks(model, BLOCK_LISTS),
    load_original=load_original,
    num_tokens=_num_tokens,
    beside=lambda config: config.condition,
    pack_known=draw_known,
    num_heads=lambda config: config.num_attention_heads,
    exchanges=_exchanges,
    lora_targets=("*",),  # as published: every linear layer
    lora_names=LoraNames(root="lora_unet__"),
)
