"""Open-Sora 2.0 (MMDiT), and Flux, whose architecture it shares. See README.md in this folder."""

from __future__ import annotations

from typing import Literal, cast

from torch import Tensor, nn

from frameloom.models.denoisers.base import NOTHING, Conditions, DenoiserFamily, TextStates, refuse_foreign
from frameloom.models.denoisers.opensora2.config import SIZES, MMDiTConfig, configure
from frameloom.models.denoisers.opensora2.known import pack_known
from frameloom.models.denoisers.opensora2.model import build
from frameloom.models.denoisers.opensora2.packing import token_grid
from frameloom.models.denoisers.opensora2.sharding import BLOCK_LISTS
from frameloom.models.denoisers.opensora2.weights import load_original

__all__ = ["FAMILY"]


def _patch(config: MMDiTConfig) -> tuple[int, int, int]:
    return 1, config.patch_size, config.patch_size


def _num_tokens(config: MMDiTConfig, latent_FHW: tuple[int, int, int]) -> int:
    frames, rows, columns = token_grid(latent_FHW, config.patch_size)
    return frames * rows * columns


def _denoise(
    model: nn.Module, noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates, given: Conditions = NOTHING
) -> Tensor:
    """`text.mask_BK` is not used: as in the original, padding is attended to.

    Models with cond_embed see the mask and the masked latent, 1 + C channels; none given is text to video.
    """
    refuse_foreign(given, FAMILY.name, known=("beside_BCFHW", "guidance_B"))
    prediction = model(noisy_BCFHW, timestep_B, text.tokens_BKD, text.pooled_BD, given.beside_BCFHW, given.guidance_B)
    return cast(Tensor, prediction)


def _beside(config: MMDiTConfig) -> Literal["none", "inpaint"]:
    return "inpaint" if config.cond_embed else "none"


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [block for name in BLOCK_LISTS for block in cast(nn.ModuleList, getattr(model, name))]


FAMILY = DenoiserFamily(
    name="opensora2",
    config_class=MMDiTConfig,
    sizes=SIZES,
    configure=configure,
    build=build,
    patch=_patch,
    denoise=_denoise,
    blocks=_blocks,
    load_original=load_original,
    num_tokens=_num_tokens,
    beside=_beside,
    pack_known=pack_known,
    # Attention of both kinds of blocks, with fused and with split projections.
    lora_targets=("*_attn.*", "single_blocks.*.[qk]_proj", "single_blocks.*.v_mlp", "single_blocks.*.linear?"),
)
