"""Open-Sora 2.0 (MMDiT), and Flux, whose architecture it shares. See README.md in this folder."""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor, nn

from frameloom.distributed.sequence_parallel import Exchange
from frameloom.models.denoisers.base import (
    NOTHING,
    Conditions,
    DenoiserFamily,
    TextStates,
    list_blocks,
    refuse_foreign,
)
from frameloom.models.denoisers.opensora2.config import SIZES, WHERE, MMDiTConfig, configure
from frameloom.models.denoisers.opensora2.known import pack_known
from frameloom.models.denoisers.opensora2.model import build
from frameloom.models.denoisers.opensora2.sharding import BLOCK_LISTS
from frameloom.models.denoisers.opensora2.weights import load_original
from frameloom.models.layers.patches import token_grid

__all__ = ["FAMILY"]


def _num_tokens(config: MMDiTConfig, latent_FHW: tuple[int, int, int]) -> int:
    return math.prod(token_grid(latent_FHW, config.patch_size, where=WHERE))


def _exchanges(config: MMDiTConfig, latent_FHW: tuple[int, int, int], num_text: int, degree: int) -> list[Exchange]:
    joint = Exchange(num_text + _num_tokens(config, latent_FHW), config.hidden_size)
    return [joint] * (config.depth + config.depth_single_blocks)


def _denoise(
    model: nn.Module, noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates, given: Conditions = NOTHING
) -> Tensor:
    """`text.mask_BK` is not used: as in the original, padding is attended to.

    Models with cond_embed see the mask and the masked latent, 1 + C channels; none given is text to video.
    """
    config = cast(MMDiTConfig, model.config)
    inputs = (("beside_BCFHW", config.cond_embed), ("guidance_B", config.guidance_embed))
    refuse_foreign(given, FAMILY.name, known=[name for name, is_there in inputs if is_there])
    prediction = model(noisy_BCFHW, timestep_B, text.tokens_BKD, text.pooled_BD, given.beside_BCFHW, given.guidance_B)
    return cast(Tensor, prediction)


FAMILY = DenoiserFamily(
    name="opensora2",
    config_class=MMDiTConfig,
    sizes=SIZES,
    configure=configure,
    build=build,
    patch=lambda config: (1, config.patch_size, config.patch_size),
    denoise=_denoise,
    blocks=lambda model: list_blocks(model, BLOCK_LISTS),
    load_original=load_original,
    num_tokens=_num_tokens,
    beside=lambda config: "inpaint" if config.cond_embed else "none",
    pack_known=pack_known,
    knows="ends",
    find_kept=lambda beside_BCFHW: (beside_BCFHW[:, :1], beside_BCFHW[:, 1:]),
    told_guidance=lambda config: config.guidance_embed,
    num_heads=lambda config: config.num_heads,
    exchanges=_exchanges,
    # Attention of both kinds of blocks, with fused and with split projections.
    lora_targets=("*_attn.*", "single_blocks.*.[qk]_proj", "single_blocks.*.v_mlp", "single_blocks.*.linear?"),
)
