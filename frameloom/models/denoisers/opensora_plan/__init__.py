"""OpenSoraT2V of Open-Sora-Plan 1.3, and its inpaint variant. See README.md in this folder."""

from __future__ import annotations

from typing import Literal, cast

from torch import Tensor, nn

from frameloom.models.denoisers.base import NOTHING, Conditions, DenoiserFamily, TextStates, refuse_foreign
from frameloom.models.denoisers.opensora_plan.config import SIZES, OpenSoraPlanConfig, configure
from frameloom.models.denoisers.opensora_plan.known import pack_known
from frameloom.models.denoisers.opensora_plan.model import build
from frameloom.models.denoisers.opensora_plan.positions import token_grid
from frameloom.models.denoisers.opensora_plan.sharding import BLOCK_LISTS
from frameloom.models.denoisers.opensora_plan.weights import load_original

__all__ = ["FAMILY"]

NUM_TIMESTEPS = 1000


def _patch(config: OpenSoraPlanConfig) -> tuple[int, int, int]:
    return 1, config.patch_size, config.patch_size


def _num_tokens(config: OpenSoraPlanConfig, latent_FHW: tuple[int, int, int]) -> int:
    frames, rows, columns = token_grid(latent_FHW, config.patch_size)
    return frames * rows * columns


def _denoise(
    model: nn.Module, noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates, given: Conditions = NOTHING
) -> Tensor:
    """The pooled text vector is not used. An inpaint model without a condition is told that nothing is known."""
    config = cast(OpenSoraPlanConfig, model.config)
    known = ("cells_BFHW", "beside_BCFHW") if config.inpaint else ("cells_BFHW",)
    refuse_foreign(given, FAMILY.name, known=known)
    index_B = (timestep_B.float() * NUM_TIMESTEPS).round()
    prediction = model(noisy_BCFHW, index_B, text.tokens_BKD, text.mask_BK, given.cells_BFHW, given.beside_BCFHW)
    return cast(Tensor, prediction)


def _beside(config: OpenSoraPlanConfig) -> Literal["none", "inpaint"]:
    return "inpaint" if config.inpaint else "none"


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [block for name in BLOCK_LISTS for block in cast(nn.ModuleList, getattr(model, name))]


FAMILY = DenoiserFamily(
    name="opensora_plan",
    config_class=OpenSoraPlanConfig,
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
    lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
)
