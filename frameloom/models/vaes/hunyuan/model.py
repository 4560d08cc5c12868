"""The Hunyuan autoencoder: diffusers' layers with frame-causal attention, optionally tiled.

Shape letters: B batch, C channels, F frames, H height, W width, N cells of one frame.

Strides are (4, 8, 8).

Frame by frame with the keys of the frames so far, attention needs no mask. The mask that diffusers makes for it has
(F * N)^2 numbers, 4.5 GB in float32 for a 256 px clip of 129 frames, and half of the products it is for are wasted.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import (
    AutoencoderKLHunyuanVideo,
    HunyuanVideoResnetBlockCausal3D,
)
from torch import Tensor, nn

from frameloom.models.layers.attention.attention import attend
from frameloom.models.vaes.base import VideoVAE
from frameloom.models.vaes.blocks import NORM_EPS
from frameloom.models.vaes.hunyuan.config import HunyuanConfig


class HunyuanVAE(VideoVAE):
    """Its keys are those of published files."""

    block_types = (HunyuanVideoResnetBlockCausal3D,)

    def __init__(self, config: HunyuanConfig) -> None:
        super().__init__(config)
        whole = AutoencoderKLHunyuanVideo(
            latent_channels=config.latent_channels,
            block_out_channels=config.block_channels,
            layers_per_block=config.layers_per_block,
            norm_num_groups=config.norm_groups,
            mid_block_add_attention=False,
        )
        self.encoder = whole.encoder
        self.decoder = whole.decoder
        self.quant_conv = whole.quant_conv
        self.post_quant_conv = whole.post_quant_conv
        for half in (self.encoder, self.decoder):
            width = config.block_channels[-1]
            attention = FrameCausalAttention(width, config.norm_groups) if config.attention else None
            half.mid_block = MiddleBlock(half.mid_block.resnets, attention)

    def encode_piece(self, pixels_BCFHW: Tensor) -> Tensor:
        raw_BCFHW: Tensor = self.quant_conv(self.encoder(pixels_BCFHW))
        return raw_BCFHW

    def decode_piece(self, latent_BCFHW: Tensor) -> Tensor:
        pixels_BCFHW: Tensor = self.decoder(self.post_quant_conv(latent_BCFHW))
        return pixels_BCFHW


class MiddleBlock(nn.Module):
    """`resnets` are two; without attention the first simply goes before the second."""

    def __init__(self, resnets: Iterable[nn.Module], attention: FrameCausalAttention | None) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([attention] if attention is not None else [])
        self.resnets = nn.ModuleList(resnets)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        first, second = self.resnets
        x_BCFHW = first(x_BCFHW)
        for attention in self.attentions:
            x_BCFHW = attention(x_BCFHW)
        out: Tensor = second(x_BCFHW)
        return out


class FrameCausalAttention(nn.Module):
    """One head over all channels, with its norm and its residual; the names are those of published files."""

    def __init__(self, channels: int, norm_groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(norm_groups, channels, eps=NORM_EPS)
        self.to_q = nn.Linear(channels, channels)
        self.to_k = nn.Linear(channels, channels)
        self.to_v = nn.Linear(channels, channels)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        num_frames, height, width = x_BCFHW.shape[2:]
        num_cells = height * width
        tokens_BNC = self.group_norm(x_BCFHW).flatten(2).transpose(1, 2)
        q, k, v = (layer(tokens_BNC).unsqueeze(1) for layer in (self.to_q, self.to_k, self.to_v))
        seen = []
        for frame in range(num_frames):
            stop = (frame + 1) * num_cells
            seen.append(attend(q[:, :, stop - num_cells : stop], k[:, :, :stop], v[:, :, :stop]))
        out_BNC: Tensor = self.to_out[0](torch.cat(seen, dim=2).squeeze(1))
        return x_BCFHW + torch.unflatten(out_BNC.transpose(1, 2), 2, (num_frames, height, width))
