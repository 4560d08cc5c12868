"""WFVAE: a causal video autoencoder with wavelet coefficients as side inputs and outputs.

Shape letters: B batch, C channels, F frames, H height, W width.

Strides are (4, 8, 8) as published.

Pixels become 24 coefficient channels; the low band of each level is transformed again and joins the main path one
level below (encoder), or is predicted by a side branch and added one level above (decoder).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.models.vaes.base import Moments, VideoVAE
from frameloom.models.vaes.wfvae.blocks import (
    CausalConv3d,
    Downsample2D,
    Downsample3D,
    FrameAttention,
    FrameConv2d,
    FrameStream,
    ResBlock2D,
    ResBlock3D,
    Upsample2D,
    Upsample3D,
    build_norm,
    join_channels,
    run_in_pieces,
)
from frameloom.models.vaes.wfvae.config import WFVAEConfig
from frameloom.models.vaes.wfvae.wavelet import (
    HaarJoin2D,
    HaarJoin3D,
    HaarSplit2D,
    HaarSplit3D,
    haar_taps_3d,
    join_3d,
    split_3d,
)

COLOURS = 3
BANDS_OF = {False: 4, True: 8}


class WFVAE(VideoVAE):
    def __init__(self, config: WFVAEConfig) -> None:
        super().__init__(
            strides=config.strides,
            latent_channels=config.latent_channels,
            causal=config.causal,
            scale=config.scale,
            shift=config.shift,
        )
        self.config = config
        self._encode_frames: int | None = None
        self._decode_frames: int | None = None
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def enable_chunking(self, *, encode_frames: int = 32, decode_frames: int = 4) -> None:
        """Encode and decode in pieces of so many pixel or latent frames; memory no longer grows with the clip.

        The result is that of the whole clip, for every length. The norm `groupnorm` takes its statistics over all
        frames, so no piece can know them; that variant is refused.
        """
        if self.config.norm == "groupnorm":
            raise ConfigError(
                "WFVAE with groupnorm: its statistics span the whole clip, so encoding in pieces would change the "
                "result; leave chunking off, or use a layernorm model"
            )
        if encode_frames < 1 or encode_frames % self.strides[0]:
            raise ConfigError(f"encode_frames {encode_frames}: choose a positive multiple of {self.strides[0]}")
        if decode_frames < 1:
            raise ConfigError(f"decode_frames {decode_frames}: choose 1 or more")
        self._encode_frames, self._decode_frames = encode_frames, decode_frames

    def disable_chunking(self) -> None:
        self._encode_frames = self._decode_frames = None

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        return Moments.from_raw(self.encode_raw(pixels_BCFHW))

    def encode_raw(self, pixels_BCFHW: Tensor) -> Tensor:
        """Means and unclamped log-variances, one behind the other in the channels."""
        self.check_pixels(pixels_BCFHW)
        return run_in_pieces(lambda x, stream: self._encode_piece(x, stream)[0], pixels_BCFHW, self._encode_frames)

    def decode(self, latent_BCFHW: Tensor) -> Tensor:
        return run_in_pieces(lambda z, stream: self._decode_piece(z, stream)[0], latent_BCFHW, self._decode_frames)

    def encode_with_coefficients(self, pixels_BCFHW: Tensor) -> tuple[Moments, Coefficients]:
        """For training: also the coefficients that the decoder should predict. Never in pieces."""
        self.check_pixels(pixels_BCFHW)
        raw_BCFHW, coefficients = self._encode_piece(pixels_BCFHW, None)
        return Moments.from_raw(raw_BCFHW), coefficients

    def decode_with_coefficients(self, latent_BCFHW: Tensor) -> tuple[Tensor, Coefficients]:
        """For training: also the coefficients that the decoder predicted. Never in pieces."""
        return self._decode_piece(latent_BCFHW, None)

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, ResBlock2D | ResBlock3D)]

    def split_pixels(self, pixels_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        """The 24 coefficient channels that the encoder starts from."""
        return split_3d(pixels_BCFHW, haar_taps_3d().to(pixels_BCFHW.device), "pixels", stream)

    def _encode_piece(self, pixels_BCFHW: Tensor, stream: FrameStream | None) -> tuple[Tensor, Coefficients]:
        bands_BCFHW = self.split_pixels(pixels_BCFHW, stream)
        bands_BCFHW = bands_BCFHW.contiguous(memory_format=torch.channels_last_3d)
        raw_BCFHW, coefficients = self.encoder(bands_BCFHW, stream)
        return raw_BCFHW, coefficients

    def _decode_piece(self, latent_BCFHW: Tensor, stream: FrameStream | None) -> tuple[Tensor, Coefficients]:
        latent_BCFHW = latent_BCFHW.contiguous(memory_format=torch.channels_last_3d)
        bands_BCFHW, coefficients = self.decoder(latent_BCFHW, stream)
        return join_3d(bands_BCFHW, haar_taps_3d().to(bands_BCFHW.device), stream), coefficients


class Coefficients(NamedTuple):
    """Wavelet coefficients of the two inner levels, for the wavelet loss."""

    level1_BCFHW: Tensor
    level2_BCFHW: Tensor


class Encoder(nn.Module):
    """Pixel coefficients to raw moments."""

    def __init__(self, config: WFVAEConfig) -> None:
        super().__init__()
        base, flow = config.base_channels, config.encoder_flow_channels
        self.down1 = Layers(
            FrameConv2d(8 * COLOURS, base),
            *[ResBlock2D(base, config.norm) for _ in range(config.encoder_res_blocks)],
            Downsample3D(base) if config.level1_temporal else Downsample2D(base),
        )
        self.down2 = Layers(
            FrameConv2d(base + flow, 2 * base),
            *[ResBlock3D(2 * base, 2 * base, config.norm) for _ in range(config.encoder_res_blocks)],
            Downsample3D(2 * base) if config.level2_temporal else Downsample2D(2 * base),
        )
        self.connect_l1 = FrameConv2d(BANDS_OF[config.level1_temporal] * COLOURS, flow)
        self.connect_l2 = FrameConv2d(BANDS_OF[config.level2_temporal] * COLOURS, flow)
        self.mid = _build_middle(config, (2 * base + flow, 4 * base, 4 * base))
        self.norm_out = build_norm(config.norm, 4 * base)
        self.conv_out = CausalConv3d(4 * base, 2 * config.latent_channels)
        self.wavelet_tranform_l1 = HaarSplit3D() if config.level1_temporal else HaarSplit2D()
        self.wavelet_tranform_l2 = HaarSplit3D() if config.level2_temporal else HaarSplit2D()

    def forward(self, bands_BCFHW: Tensor, stream: FrameStream | None = None) -> tuple[Tensor, Coefficients]:
        level1 = self.wavelet_tranform_l1(bands_BCFHW[:, :COLOURS], stream)
        level2 = self.wavelet_tranform_l2(level1[:, :COLOURS], stream)
        h = self.down1(bands_BCFHW, stream)
        h = self.down2(join_channels([h, self.connect_l1(level1)]), stream)
        h = self.mid(join_channels([h, self.connect_l2(level2)]), stream)
        raw_BCFHW = self.conv_out(F.silu(self.norm_out(h)), stream)
        return raw_BCFHW, Coefficients(level1, level2)


class Decoder(nn.Module):
    """Latents to pixel coefficients."""

    def __init__(self, config: WFVAEConfig) -> None:
        super().__init__()
        base, self.flow = config.base_channels, config.decoder_flow_channels
        num_blocks = config.decoder_res_blocks
        self.conv_in = CausalConv3d(config.latent_channels, 4 * base)
        self.mid = _build_middle(config, (4 * base, 4 * base, 4 * base + self.flow))
        self.up2 = Layers(
            *[ResBlock3D(4 * base, 4 * base, config.norm) for _ in range(num_blocks)],
            Upsample3D(4 * base, config.time_interpolation) if config.level2_temporal else Upsample2D(4 * base),
            ResBlock3D(4 * base, 4 * base + self.flow, config.norm),
        )
        self.up1 = Layers(
            *[ResBlock3D((2 if index else 4) * base, 2 * base, config.norm) for index in range(num_blocks)],
            Upsample3D(2 * base, config.time_interpolation) if config.level1_temporal else Upsample2D(2 * base),
            ResBlock3D(2 * base, 2 * base, config.norm),
        )
        self.layer = Layers(ResBlock3D(2 * base, base, config.norm), ResBlock3D(base, base, config.norm))
        self.connect_l1 = self._build_branch(config, BANDS_OF[config.level1_temporal])
        self.connect_l2 = self._build_branch(config, BANDS_OF[config.level2_temporal])
        self.norm_out = build_norm(config.norm, base)
        self.conv_out = FrameConv2d(base, 8 * COLOURS)
        self.inverse_wavelet_tranform_l1 = HaarJoin3D() if config.level1_temporal else HaarJoin2D()
        self.inverse_wavelet_tranform_l2 = HaarJoin3D() if config.level2_temporal else HaarJoin2D()

    @staticmethod
    def _build_branch(config: WFVAEConfig, num_bands: int) -> Layers:
        width = config.decoder_flow_channels
        blocks = [ResBlock3D(width, width, config.norm) for _ in range(config.connect_res_blocks)]
        return Layers(*blocks, FrameConv2d(width, num_bands * COLOURS))

    def forward(self, latent_BCFHW: Tensor, stream: FrameStream | None = None) -> tuple[Tensor, Coefficients]:
        h, side = self._split(self.mid(self.conv_in(latent_BCFHW, stream), stream))
        level2 = self.connect_l2(side, stream)
        low2 = self.inverse_wavelet_tranform_l2(level2, stream)
        h, side = self._split(self.up2(h, stream))
        level1 = self._add_low_band(self.connect_l1(side, stream), low2, "low2", stream)
        low1 = self.inverse_wavelet_tranform_l1(level1, stream)
        h = self.layer(self.up1(h, stream), stream)
        bands_BCFHW = self.conv_out(F.silu(self.norm_out(h)))
        return self._add_low_band(bands_BCFHW, low1, "low1", stream), Coefficients(level1, level2)

    def _split(self, h_BCFHW: Tensor) -> tuple[Tensor, Tensor]:
        """The main path, and the channels of the side branch behind it."""
        return h_BCFHW[:, : -self.flow], h_BCFHW[:, -self.flow :]

    @staticmethod
    def _add_low_band(bands_BCFHW: Tensor, low_BCFHW: Tensor, name: str, stream: FrameStream | None) -> Tensor:
        if stream is not None:
            low_BCFHW = stream.align(name, low_BCFHW, bands_BCFHW.shape[2])
        return join_channels([bands_BCFHW[:, :COLOURS] + low_BCFHW, bands_BCFHW[:, COLOURS:]])


def _build_middle(config: WFVAEConfig, widths: Sequence[int]) -> Layers:
    before, inside, after = widths
    attention = [FrameAttention(inside, config.norm)] if config.attention else []
    return Layers(
        ResBlock3D(before, inside, config.norm),
        *attention,
        ResBlock3D(inside, after, config.norm),
    )


class Layers(nn.Sequential):
    """Layers in a row that share one stream."""

    def forward(self, x_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        for layer in self:
            x_BCFHW = layer(x_BCFHW, stream)
        return x_BCFHW
