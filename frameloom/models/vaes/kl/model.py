"""Stable Diffusion's image autoencoder on clips: diffusers' encoder and decoder, frame by frame.

Shape letters: B batch, C channels, F frames, H height, W width, N = B * F pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from frameloom.core.errors import ConfigError, DataError
from frameloom.models.layers.attention.diffusers_processor import AttendProcessor
from frameloom.models.layers.patches import fold_frames, unfold_frames
from frameloom.models.vaes.base import VideoVAE
from frameloom.models.vaes.kl.config import KLConfig


class KLVAE(VideoVAE):
    """Keys of the state dict are those of diffusers' `AutoencoderKL`."""

    block_types = (ResnetBlock2D,)
    exact_chunks = True  # frames do not see each other

    def __init__(self, config: KLConfig) -> None:
        super().__init__(config)
        parts = AutoencoderKL(**diffusers_arguments(config))
        parts.set_attn_processor(AttendProcessor())
        self.encoder, self.decoder = parts.encoder, parts.decoder
        self.quant_conv, self.post_quant_conv = parts.quant_conv, parts.post_quant_conv

    def encode_piece(self, pixels_BCFHW: Tensor) -> Tensor:
        return self._run_pictures(lambda pixels_NCHW: self.quant_conv(self.encoder(pixels_NCHW)), pixels_BCFHW)

    def decode_piece(self, latent_BCFHW: Tensor) -> Tensor:
        if latent_BCFHW.ndim != 5 or latent_BCFHW.shape[1] != self.latent_channels:
            raise DataError(
                f"latent of shape {tuple(latent_BCFHW.shape)}: expected (batch, {self.latent_channels}, frames, "
                "height, width)"
            )
        return self._run_pictures(lambda latent_NCHW: self.decoder(self.post_quant_conv(latent_NCHW)), latent_BCFHW)

    def _run_pictures(self, step: Callable[[Tensor], Tensor], x_BCFHW: Tensor) -> Tensor:
        """`step` on the frames as pictures, `policy.chunk_frames` at a time."""
        dtype, num_frames = self.quant_conv.weight.dtype, x_BCFHW.shape[2]
        if self.config.force_upcast and dtype == torch.float16:
            raise ConfigError(
                "kl autoencoder: its activations overflow in float16; keep it in float32 or bfloat16, or set "
                "force_upcast to false for weights that were made for float16 (sdxl-vae-fp16-fix)"
            )
        # Channels last in memory: the convolutions keep it, and are faster in it.
        x_NCHW = fold_frames(x_BCFHW).contiguous(memory_format=torch.channels_last)
        pieces = torch.split(x_NCHW, self.policy.chunk_frames or max(len(x_NCHW), 1))
        with torch.autocast(x_NCHW.device.type, enabled=False) if self.config.force_upcast else nullcontext():
            done = [step(piece.to(dtype)) for piece in pieces]
        y_NCHW = torch.cat(done) if len(done) > 1 else done[0]
        return unfold_frames(y_NCHW.to(x_BCFHW.dtype), num_frames)


def diffusers_arguments(config: KLConfig) -> dict[str, Any]:
    """The same architecture in the words of `AutoencoderKL`."""
    num_levels = len(config.widths)
    return {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * num_levels,
        "up_block_types": ("UpDecoderBlock2D",) * num_levels,
        "block_out_channels": config.widths,
        "layers_per_block": config.num_res_blocks,
        "latent_channels": config.latent_channels,
        "norm_num_groups": config.norm_groups,
    }
