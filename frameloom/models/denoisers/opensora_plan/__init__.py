"""OpenSoraT2V of Open-Sora-Plan 1.3, and its inpaint variant. See README.md in this folder."""

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
from frameloom.models.denoisers.opensora_plan.config import SIZES, WHERE, OpenSoraPlanConfig, configure
from frameloom.models.denoisers.opensora_plan.known import pack_known
from frameloom.models.denoisers.opensora_plan.model import build
from frameloom.models.denoisers.opensora_plan.sharding import BLOCK_LISTS
from frameloom.models.denoisers.opensora_plan.weights import load_original
from frameloom.models.layers.patches import token_grid
from frameloom.models.layers.sequence_parallel import Exchange

__all__ = ["FAMILY"]


def _num_tokens(config: OpenSoraPlanConfig, latent_FHW: tuple[int, int, int]) -> int:
    return math.prod(token_grid(latent_FHW, config.patch_size, where=WHERE))


def _exchanges(
    config: OpenSoraPlanConfig, latent_FHW: tuple[int, int, int], num_text: int, degree: int
) -> list[Exchange]:
    return [Exchange(_num_tokens(config, latent_FHW), config.hidden_size)] * config.num_layers


def _denoise(
    model: nn.Module, noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates, given: Conditions = NOTHING
) -> Tensor:
    """The pooled text vector is not used. An inpaint model without a condition is told that nothing is known."""
    config = cast(OpenSoraPlanConfig, model.config)
    known = ("cells_BFHW", "beside_BCFHW") if config.inpaint else ("cells_BFHW",)
    refuse_foreign(given, FAMILY.name, known=("dropout", *known))
    conditions = (text.mask_BK, given.cells_BFHW, given.beside_BCFHW, given.dropout)
    return cast(Tensor, model(noisy_BCFHW, find_index(timestep_B), text.tokens_BKD, *conditions))


FAMILY = DenoiserFamily(
    name="opensora_plan",
    config_class=OpenSoraPlanConfig,
    sizes=SIZES,
    configure=configure,
    build=build,
    patch=lambda config: (1, config.patch_size, config.patch_size),
    denoise=_denoise,
    blocks=lambda model: list_blocks(model, BLOCK_LISTS),
    load_original=load_original,
    num_tokens=_num_tokens,
    beside=lambda config: "inpaint" if config.inpaint else "none",
    pack_known=pack_known,
    num_heads=lambda config: config.num_attention_heads,
    exchanges=_exchanges,
    lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
)
