"""CausalVAE, the video autoencoder of Open-Sora-Plan 1.0 to 1.2: inflated from an image autoencoder, causal in time.

Shape letters: B batch, C channels, F frames, H height, W width.

Strides are (4, 8, 8) as published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.layers.causal_conv import CausalConv3d, prepend_past
from frameloom.models.vaes.base import VideoVAE
from frameloom.models.vaes.blocks import (
    COLOURS,
    NORM_EPS,
    Downsample2D,
    Downsample3D,
    FrameAttention,
    FrameConv2d,
    Norm,
    ResBlock2D,
    ResBlock3D,
    Upsample2D,
)
from frameloom.models.vaes.causal.config import CausalVAEConfig

_START_MIX = 2.0


class CausalVAE(VideoVAE):
    block_types = (ResBlock2D, ResBlock3D)

    def __init__(self, config: CausalVAEConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        if config.use_quant_layer:
            self.quant_conv = CausalConv3d(2 * config.z_channels, 2 * config.embed_dim, 1)
            self.post_quant_conv = CausalConv3d(config.embed_dim, config.z_channels, 1)

    def encode_piece(self, pixels_BCFHW: Tensor) -> Tensor:
        raw_BCFHW: Tensor = self.encoder(pixels_BCFHW)
        return self.quant_conv(raw_BCFHW) if self.config.use_quant_layer else raw_BCFHW

    def decode_piece(self, latent_BCFHW: Tensor) -> Tensor:
        h = self.post_quant_conv(latent_BCFHW) if self.config.use_quant_layer else latent_BCFHW
        pixels_BCFHW: Tensor = self.decoder(h)
        return pixels_BCFHW


class Encoder(nn.Module):
    """Pixels to raw moments."""

    def __init__(self, config: CausalVAEConfig) -> None:
        super().__init__()
        widths, norm = config.widths, _norm_of(config)
        self.conv_in: nn.Module
        if config.encoder_conv_in == "Conv2d":
            self.conv_in = FrameConv2d(COLOURS, config.hidden_size)
        else:
            self.conv_in = CausalConv3d(COLOURS, config.hidden_size)
        self.down = nn.ModuleList()
        before = config.hidden_size
        for index, width in enumerate(widths):
            resizes = {
                "downsample": config.encoder_spatial_downsample[index],
                "time_downsample": config.encoder_temporal_downsample[index],
            }
            res_block = config.encoder_resnet_blocks[index]
            self.down.append(Level(res_block, (before, width), config.num_res_blocks, norm, resizes))
            before = width
        self.mid = Middle(widths[-1], config.encoder_attention, norm)
        self.norm_out = norm(widths[-1])
        self.conv_out = CausalConv3d(widths[-1], 2 * config.z_channels)

    def forward(self, pixels_BCFHW: Tensor) -> Tensor:
        h: Tensor = self.conv_in(pixels_BCFHW)
        for level in self.down:
            h = level(h)
        raw_BCFHW: Tensor = self.conv_out(F.silu(self.norm_out(self.mid(h))))
        return raw_BCFHW


class Decoder(nn.Module):
    """Latents to pixels."""

    def __init__(self, config: CausalVAEConfig) -> None:
        super().__init__()
        widths, norm = config.widths, _norm_of(config)
        self.conv_in = CausalConv3d(config.z_channels, widths[-1])
        self.mid = Middle(widths[-1], config.decoder_attention, norm)
        levels = []
        before = widths[-1]
        for index in reversed(range(config.num_levels)):
            width = widths[index]
            resizes = {
                "upsample": config.decoder_spatial_upsample[index],
                "time_upsample": config.decoder_temporal_upsample[index],
            }
            res_block = config.decoder_resnet_blocks[index]
            levels.append(Level(res_block, (before, width), config.num_res_blocks + 1, norm, resizes))
            before = width
        self.up = nn.ModuleList(reversed(levels))
        self.norm_out = norm(widths[0])
        self.conv_out = CausalConv3d(widths[0], COLOURS)

    def forward(self, latent_BCFHW: Tensor) -> Tensor:
        h: Tensor = self.mid(self.conv_in(latent_BCFHW))
        for level in reversed(self.up):
            h = level(h)
        pixels_BCFHW: Tensor = self.conv_out(F.silu(self.norm_out(h)))
        return pixels_BCFHW


class Level(nn.Module):
    """Residual blocks, then the resizing in space and in time that this level has, by names that say its direction."""

    def __init__(
        self,
        res_block: str,
        widths: tuple[int, int],
        num_blocks: int,
        norm: Norm,
        resizes: Mapping[str, str],
    ) -> None:
        super().__init__()
        before, inside = widths
        build = ResBlock3D if res_block == "ResnetBlock3D" else ResBlock2D
        self.block = nn.ModuleList(build(inside if index else before, inside, norm) for index in range(num_blocks))
        self.resizes = [name for name, kind in resizes.items() if kind]
        for name in self.resizes:
            self.add_module(name, _RESIZES[resizes[name]](inside))

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        for block in self.block:
            x_BCFHW = block(x_BCFHW)
        for name in self.resizes:
            x_BCFHW = getattr(self, name)(x_BCFHW)
        return x_BCFHW


class Middle(nn.Module):
    def __init__(self, channels: int, attention: str, norm: Norm) -> None:
        super().__init__()
        self.block_1 = ResBlock3D(channels, channels, norm)
        self.attn_1 = FrameAttention(channels, norm, mixes_frames=attention == "AttnBlock3D")
        self.block_2 = ResBlock3D(channels, channels, norm)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        result: Tensor = self.block_2(self.attn_1(self.block_1(x_BCFHW)))
        return result


def _norm_of(config: CausalVAEConfig) -> Norm:
    return partial(nn.GroupNorm, config.norm_groups, eps=NORM_EPS)


class TimeDownsample(nn.Module):
    """The mean of three frames at every second one: 2n + 1 frames become n + 1. `mixed`: part of that, part of a
    convolution; the share is learned."""

    def __init__(self, channels: int, *, mixed: bool) -> None:
        super().__init__()
        self.mix_factor = nn.Parameter(torch.full((1,), _START_MIX)) if mixed else None
        if mixed:
            self.conv = nn.Conv3d(channels, channels, 3, stride=(2, 1, 1), padding=(0, 1, 1))

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        x_BCFHW = prepend_past(x_BCFHW, self, None, kernel=3)
        mean_BCFHW = F.avg_pool3d(x_BCFHW, (3, 1, 1), stride=(2, 1, 1))
        return mean_BCFHW if self.mix_factor is None else _mix(self.mix_factor, mean_BCFHW, self.conv(x_BCFHW))


class Upsample(nn.Module):
    """Twice the frames but for the first: n + 1 become 2n + 1; with `space` 2 twice the height and width, too. Linear.

    With `convolved` a convolution follows; `mixed`: part of it, part of its input; the share is learned.
    """

    def __init__(self, channels: int, *, space: float = 1.0, convolved: bool = False, mixed: bool = False) -> None:
        super().__init__()
        self.space = space
        self.mix_factor = nn.Parameter(torch.full((1,), _START_MIX)) if mixed else None
        self.conv = CausalConv3d(channels, channels) if convolved else None

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        first, rest = x_BCFHW[:, :, :1], x_BCFHW[:, :, 1:]
        parts = [first]
        if self.space != 1.0:
            parts = [F.interpolate(first, scale_factor=(1.0, self.space, self.space), mode="trilinear")]
        if rest.shape[2]:
            parts.append(F.interpolate(rest, scale_factor=(2.0, self.space, self.space), mode="trilinear"))
        large_BCFHW = torch.cat(parts, dim=2)
        if self.conv is None:
            return large_BCFHW
        result: Tensor = self.conv(large_BCFHW)
        return result if self.mix_factor is None else _mix(self.mix_factor, large_BCFHW, result)


def _mix(factor: Tensor, plain: Tensor, convolved: Tensor) -> Tensor:
    share = torch.sigmoid(factor)
    return share * plain + (1 - share) * convolved


_RESIZES: dict[str, Callable[[int], nn.Module]] = {
    "Downsample": Downsample2D,
    "SpatialDownsample2x": partial(Downsample3D, in_time=False),
    "Spatial2xTime2x3DDownsample": Downsample3D,
    "TimeDownsample2x": partial(TimeDownsample, mixed=False),
    "TimeDownsampleRes2x": partial(TimeDownsample, mixed=True),
    "SpatialUpsample2x": partial(Upsample2D, conv_3d=True),
    "Spatial2xTime2x3DUpsample": partial(Upsample, space=2.0, convolved=True),
    "TimeUpsample2x": Upsample,
    "TimeUpsampleRes2x": partial(Upsample, convolved=True, mixed=True),
}
