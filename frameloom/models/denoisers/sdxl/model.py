"""The SDXL UNet: diffusers' class with our attention, fresh weights and size conditions.

Shape letters: B batch, C channels, F frames, H height, W width, K text tokens, D width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.models.denoisers.base import NUM_TIMESTEPS, Conditions, Denoiser, find_index
from frameloom.models.denoisers.sdxl.config import BLOCK_LISTS, STAGES, SDXLConfig
from frameloom.models.layers.attention.diffusers_processor import AttendProcessor

# Pixels per latent cell, for the size conditions of a clip that comes without any.
PIXELS_PER_CELL = 8
# The refiner's input for pictures that have no score, as in the published code.
AESTHETIC_SCORE = 6.0
# Float32 is off by less when an index is divided by 1000 and multiplied again.
_INDEX_ROUNDING = 1e-3


class SDXLUNet(Denoiser, UNet2DConditionModel):  # type: ignore[misc]
    """Keys of the state dict are those of diffusers' folders, and so is `config`; ours is `architecture`."""

    family, block_lists = "sdxl", BLOCK_LISTS

    def __init__(self, config: SDXLConfig) -> None:
        super().__init__(**diffusers_arguments(config))
        self.architecture = config
        self.set_attn_processor(AttendProcessor())  # type: ignore[arg-type]

    def accepted(self) -> tuple[str, ...]:
        return ("sizes",)

    def is_zero(self, name: str) -> bool:
        """Zero-initialises residual outputs and the final convolution."""
        return name == "conv_out" or name.endswith((".conv2", ".proj_out"))

    def blocks(self) -> list[nn.Module]:
        stages = [cast(nn.Module, getattr(self, name)) for name in STAGES]
        parts = [part for stage in stages for part in stage.named_modules()]
        lists = [part for name, part in parts if name.rpartition(".")[2] in BLOCK_LISTS]
        return [block for blocks in lists for block in cast(nn.ModuleList, blocks)]

    def forward(self, noisy_BCFHW: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
        """A clip of one frame is a picture. Text masks are not used: as in the original, padding is looked at.

        Without sizes, the picture is as large as the latent says, and not cropped.
        """
        self.check_conditions(timestep_B, conditions)
        if noisy_BCFHW.shape[2] != 1:
            raise ConfigError(
                f"sdxl: a latent of {noisy_BCFHW.shape[2]} frames; this family makes pictures, so clips must have 1 "
                "frame; set the frames of the buckets to 1, or choose a video family"
            )
        noisy_BCHW, dtype = noisy_BCFHW[:, :, 0], self.conv_in.weight.dtype
        # Size values stay float32 until their sinusoids are computed: bfloat16 cannot tell 1333 from 1336.
        sizes = self._size_values(noisy_BCHW, conditions.get("sizes"))
        # The index of a DDPM's level; a level between two of them, as an EDM has, stays as it is.
        exact_B, index_B = timestep_B.float() * NUM_TIMESTEPS, find_index(timestep_B)
        level_B = torch.where((exact_B - index_B).abs() < _INDEX_ROUNDING, index_B, exact_B)
        (prediction_BCHW,) = UNet2DConditionModel.forward(
            self,
            noisy_BCHW.to(dtype),
            level_B,
            conditions["text"].to(dtype),
            added_cond_kwargs={"text_embeds": conditions["pooled"].to(dtype), "time_ids": sizes},
            return_dict=False,
        )
        return cast(Tensor, prediction_BCHW).to(noisy_BCFHW.dtype)[:, :, None]

    def _size_values(self, noisy_BCHW: Tensor, sizes_B6: Tensor | None) -> Tensor:
        """What the size sinusoids see: original, crop, then target size, or the refiner's aesthetic score."""
        batch, _, height, width = noisy_BCHW.shape
        if sizes_B6 is None:
            shown = (height * PIXELS_PER_CELL, width * PIXELS_PER_CELL)
            sizes_B6 = torch.tensor((*shown, 0, 0, *shown), device=noisy_BCHW.device).expand(batch, 6)
        sizes_B6 = sizes_B6.to(noisy_BCHW.device, torch.float32)
        if not self.architecture.aesthetic:
            return sizes_B6
        return torch.cat([sizes_B6[:, :4], sizes_B6.new_full((batch, 1), AESTHETIC_SCORE)], dim=1)


def diffusers_arguments(config: SDXLConfig) -> dict[str, Any]:
    """The same architecture in the words of `UNet2DConditionModel`."""
    num_size_values = 5 if config.aesthetic else 6
    has_attention = [level in config.attention_levels for level in range(len(config.widths))]
    return {
        "in_channels": config.in_channels,
        "out_channels": config.in_channels,
        "block_out_channels": config.widths,
        "layers_per_block": config.num_res_blocks,
        "down_block_types": tuple("CrossAttnDownBlock2D" if has else "DownBlock2D" for has in has_attention),
        "up_block_types": tuple("CrossAttnUpBlock2D" if has else "UpBlock2D" for has in reversed(has_attention)),
        "transformer_layers_per_block": config.transformer_depth,
        # diffusers calls the number of heads so
        "attention_head_dim": tuple(max(1, width // config.num_head_channels) for width in config.widths),
        "cross_attention_dim": config.context_in_dim,
        "use_linear_projection": True,
        "norm_num_groups": config.norm_groups,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": config.size_embed_dim,
        "projection_class_embeddings_input_dim": config.vec_in_dim + num_size_values * config.size_embed_dim,
    }
