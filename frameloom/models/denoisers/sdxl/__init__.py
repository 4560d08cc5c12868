"""Stable Diffusion XL: pictures from text, with a UNet. See README.md in this folder."""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.models.denoisers.base import NOTHING, Conditions, DenoiserFamily, TextStates, refuse_foreign
from frameloom.models.denoisers.sdxl.config import SIZES, SDXLConfig, configure
from frameloom.models.denoisers.sdxl.model import SDXLUNet, build
from frameloom.models.denoisers.sdxl.sharding import BLOCK_LISTS, STAGES
from frameloom.models.denoisers.sdxl.weights import load_original, single_file_layers
from frameloom.models.lora_keys import LoraNames

__all__ = ["FAMILY"]


def _denoise(
    model: nn.Module, noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates, given: Conditions = NOTHING
) -> Tensor:
    """A clip of one frame is a picture. `text.mask_BK` is not used: as in the original, padding is looked at."""
    refuse_foreign(given, FAMILY.name, known=("sizes_B6",))
    num_frames = noisy_BCFHW.shape[2]
    if num_frames != 1:
        raise ConfigError(
            f"sdxl: a latent of {num_frames} frames; this family makes pictures, so clips must have 1 frame; set the "
            "frames of the buckets to 1, or choose a video family"
        )
    prediction_BCHW = cast(SDXLUNet, model).predict(
        noisy_BCFHW[:, :, 0], timestep_B, text.tokens_BKD, text.pooled_BD, given.sizes_B6
    )
    return prediction_BCHW[:, :, None]


def _blocks(model: nn.Module) -> list[nn.Module]:
    stages = [cast(nn.Module, getattr(model, name)) for name in STAGES]
    lists = [part for stage in stages for name, part in stage.named_modules() if name.rpartition(".")[2] in BLOCK_LISTS]
    return [block for blocks in lists for block in cast(nn.ModuleList, blocks)]


FAMILY = DenoiserFamily(
    name="sdxl",
    config_class=SDXLConfig,
    sizes=SIZES,
    configure=configure,
    build=build,
    patch=lambda config: (1, 1, 1),
    denoise=_denoise,
    blocks=_blocks,
    load_original=load_original,
    num_tokens=lambda config, latent_FHW: math.prod(latent_FHW),
    text_join="concat",
    lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
    lora_names=LoraNames(part="unet", single=single_file_layers),
)
