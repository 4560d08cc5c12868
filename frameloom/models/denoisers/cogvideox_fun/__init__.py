"""CogVideoX-Fun (2b, 5b, V1.5): text to video, inpaint and control. See README.md in this folder."""

from __future__ import annotations

import math
from typing import Literal, cast

from torch import Tensor, nn

from frameloom.models.denoisers.base import NOTHING, Conditions, DenoiserFamily, TextStates, refuse_foreign
from frameloom.models.denoisers.cogvideox_fun.config import FAMILY_NAME, SIZES, CogVideoXFunConfig, configure
from frameloom.models.denoisers.cogvideox_fun.known import draw_known
from frameloom.models.denoisers.cogvideox_fun.model import NUM_TIMESTEPS, build
from frameloom.models.denoisers.cogvideox_fun.positions import token_grid
from frameloom.models.denoisers.cogvideox_fun.sharding import BLOCK_LISTS
from frameloom.models.denoisers.cogvideox_fun.weights import load_original
from frameloom.models.lora_keys import LoraNames

__all__ = ["FAMILY"]


def _patch(config: CogVideoXFunConfig) -> tuple[int, int, int]:
    return config.patch_size_t, config.patch_size, config.patch_size


def _num_tokens(config: CogVideoXFunConfig, latent_FHW: tuple[int, int, int]) -> int:
    return math.prod(token_grid(config, latent_FHW))


def _denoise(
    model: nn.Module, noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates, given: Conditions = NOTHING
) -> Tensor:
    """`text.mask_BK` is not used: as in the original, padding is attended to. There is no pooled text."""
    config = cast(CogVideoXFunConfig, model.config)
    refuse_foreign(given, FAMILY.name, known=("beside_BCFHW",) if config.beside_channels else ())
    index_B = (timestep_B.float() * NUM_TIMESTEPS).round()
    return cast(Tensor, model(noisy_BCFHW, index_B, text.tokens_BKD, given.beside_BCFHW))


def _beside(config: CogVideoXFunConfig) -> Literal["none", "inpaint", "control"]:
    return config.condition


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [block for name in BLOCK_LISTS for block in cast(nn.ModuleList, getattr(model, name))]


FAMILY = DenoiserFamily(
    name=FAMILY_NAME,
    config_class=CogVideoXFunConfig,
    sizes=SIZES,
    configure=configure,
    build=build,
    patch=_patch,
    denoise=_denoise,
    blocks=_blocks,
    load_original=load_original,
    num_tokens=_num_tokens,
    beside=_beside,
    pack_known=draw_known,
    lora_targets=("*",),  # as published: every linear layer
    lora_names=LoraNames(root="lora_unet__"),
)
