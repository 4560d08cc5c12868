"""WFVAE: a causal video autoencoder with wavelet coefficients as side inputs and outputs.

Shape letters: B batch, C channels, F frames, H height, W width, N output frames.

Strides are (4, 8, 8) as published.

Pixels become 24 coefficient channels; the low band of each level is transformed again and joins the main path one
level below (encoder), or is predicted by a side branch and added one level above (decoder).

Activations stay in channels-last order, in memory (B, F, H, W, C): the norm over channels then needs no transposition,
and frames fold into the batch for free. In chunks, a layer that looks back keeps its last inputs; a layer that looks
ahead (linear interpolation in time) holds an output back until the next chunk, and side branches wait for it. Nothing
is computed twice and nothing is cut off, so every clip length and every chunk size is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.models.layers.causal_conv import CausalConv3d, Chunk, join_frames, run_in_chunks
from frameloom.models.layers.patches import fold_frames, unfold_frames
from frameloom.models.vaes.base import EncodePolicy, Moments, VideoVAE
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
from frameloom.models.vaes.wfvae.config import Interpolation, WFVAEConfig
from frameloom.models.vaes.wfvae.wavelet import Haar, haar_taps, join_haar, split_haar

BANDS_OF = {False: 4, True: 8}
_NORM_GROUPS = 32


class WFVAE(VideoVAE):
    block_types = (ResBlock2D, ResBlock3D)
    exact_chunks = True

    def __init__(self, config: WFVAEConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        for module in self.modules():
            if isinstance(module, CausalConv3d):
                module.channels_last = True

    def use(self, policy: EncodePolicy) -> Self:
        if policy.chunk_frames is not None and self.config.norm == "groupnorm":
            raise ConfigError(
                "WFVAE with groupnorm: its statistics span the whole clip, so encoding in pieces would change the "
                "result; leave chunking off, or use a layernorm model"
            )
        return super().use(policy)

    def encode_piece(self, pixels_BCFHW: Tensor) -> Tensor:
        return self._run_chunks(lambda x, chunk: self._encode_chunk(x, chunk)[0], pixels_BCFHW, stride=self.strides[0])

    def decode_piece(self, latent_BCFHW: Tensor) -> Tensor:
        return self._run_chunks(lambda z, chunk: self._decode_chunk(z, chunk)[0], latent_BCFHW, stride=1)

    def encode_with_coefficients(self, pixels_BCFHW: Tensor) -> tuple[Moments, Coefficients]:
        """For training: also the coefficients that the decoder should predict. Never in pieces."""
        self.check_pixels(pixels_BCFHW)
        raw_BCFHW, coefficients = self._encode_chunk(pixels_BCFHW, None)
        return Moments.from_raw(raw_BCFHW), coefficients

    def decode_with_coefficients(self, latent_BCFHW: Tensor) -> tuple[Tensor, Coefficients]:
        """For training: also the coefficients that the decoder predicted. Never in pieces."""
        return self._decode_chunk(latent_BCFHW, None)

    def split_pixels(self, pixels_BCFHW: Tensor, chunk: Chunk | None = None) -> Tensor:
        """The 24 coefficient channels that the encoder starts from."""
        return split_haar(pixels_BCFHW, haar_taps(in_time=True).to(pixels_BCFHW.device), "pixels", chunk)

    def _run_chunks(self, layers: Callable[[Tensor, Chunk | None], Tensor], x_BCFHW: Tensor, *, stride: int) -> Tensor:
        """`policy.chunk_frames` at a time, the first chunk has one frame more; `stride` pixel frames are one of x."""
        num_frames, size = x_BCFHW.shape[2], self.policy.chunk_frames
        if size is not None:
            size = max(1, size * stride // self.strides[0])
        if size is None or num_frames <= 1 + size:
            return layers(x_BCFHW, None)
        return run_in_chunks(layers, x_BCFHW, [0, *range(1 + size, num_frames, size), num_frames])

    def _encode_chunk(self, pixels_BCFHW: Tensor, chunk: Chunk | None) -> tuple[Tensor, Coefficients]:
        bands_BCFHW = self.split_pixels(pixels_BCFHW, chunk)
        bands_BCFHW = bands_BCFHW.contiguous(memory_format=torch.channels_last_3d)
        raw_BCFHW, coefficients = self.encoder(bands_BCFHW, chunk)
        return raw_BCFHW, coefficients

    def _decode_chunk(self, latent_BCFHW: Tensor, chunk: Chunk | None) -> tuple[Tensor, Coefficients]:
        latent_BCFHW = latent_BCFHW.contiguous(memory_format=torch.channels_last_3d)
        bands_BCFHW, coefficients = self.decoder(latent_BCFHW, chunk)
        pixels_BCFHW = join_haar(bands_BCFHW, haar_taps(in_time=True).to(bands_BCFHW.device), chunk)
        return pixels_BCFHW, coefficients


class Coefficients(NamedTuple):
    """Wavelet coefficients of the two inner levels, for the wavelet loss."""

    level1_BCFHW: Tensor
    level2_BCFHW: Tensor


class Encoder(nn.Module):
    """Pixel coefficients to raw moments."""

    def __init__(self, config: WFVAEConfig) -> None:
        super().__init__()
        base, flow, norm = config.base_channels, config.encoder_flow_channels, norm_of(config)
        self.down1 = Layers(
            FrameConv2d(8 * COLOURS, base),
            *[ResBlock2D(base, base, norm) for _ in range(config.encoder_res_blocks)],
            Downsample3D(base) if config.level1_temporal else Downsample2D(base),
        )
        self.down2 = Layers(
            FrameConv2d(base + flow, 2 * base),
            *[ResBlock3D(2 * base, 2 * base, norm) for _ in range(config.encoder_res_blocks)],
            Downsample3D(2 * base) if config.level2_temporal else Downsample2D(2 * base),
        )
        self.connect_l1 = FrameConv2d(BANDS_OF[config.level1_temporal] * COLOURS, flow)
        self.connect_l2 = FrameConv2d(BANDS_OF[config.level2_temporal] * COLOURS, flow)
        self.mid = _build_middle(config, (2 * base + flow, 4 * base, 4 * base))
        self.norm_out = norm(4 * base)
        self.conv_out = CausalConv3d(4 * base, 2 * config.latent_channels)
        self.wavelet_tranform_l1 = Haar(in_time=config.level1_temporal)
        self.wavelet_tranform_l2 = Haar(in_time=config.level2_temporal)

    def forward(self, bands_BCFHW: Tensor, chunk: Chunk | None = None) -> tuple[Tensor, Coefficients]:
        level1 = self.wavelet_tranform_l1(bands_BCFHW[:, :COLOURS], chunk)
        level2 = self.wavelet_tranform_l2(level1[:, :COLOURS], chunk)
        h = self.down1(bands_BCFHW, chunk)
        h = self.down2(join_channels([h, self.connect_l1(level1)]), chunk)
        h = self.mid(join_channels([h, self.connect_l2(level2)]), chunk)
        raw_BCFHW = self.conv_out(F.silu(self.norm_out(h)), chunk)
        return raw_BCFHW, Coefficients(level1, level2)


class Decoder(nn.Module):
    """Latents to pixel coefficients."""

    def __init__(self, config: WFVAEConfig) -> None:
        super().__init__()
        base, self.flow, norm = config.base_channels, config.decoder_flow_channels, norm_of(config)
        num_blocks = config.decoder_res_blocks
        self.conv_in = CausalConv3d(config.latent_channels, 4 * base)
        self.mid = _build_middle(config, (4 * base, 4 * base, 4 * base + self.flow))
        self.up2 = Layers(
            *[ResBlock3D(4 * base, 4 * base, norm) for _ in range(num_blocks)],
            Upsample3D(4 * base, config.time_interpolation) if config.level2_temporal else Upsample2D(4 * base),
            ResBlock3D(4 * base, 4 * base + self.flow, norm),
        )
        self.up1 = Layers(
            *[ResBlock3D((2 if index else 4) * base, 2 * base, norm) for index in range(num_blocks)],
            Upsample3D(2 * base, config.time_interpolation) if config.level1_temporal else Upsample2D(2 * base),
            ResBlock3D(2 * base, 2 * base, norm),
        )
        self.layer = Layers(ResBlock3D(2 * base, base, norm), ResBlock3D(base, base, norm))
        self.connect_l1, self.connect_l2 = (
            Layers(
                *[ResBlock3D(self.flow, self.flow, norm) for _ in range(config.connect_res_blocks)],
                FrameConv2d(self.flow, BANDS_OF[in_time] * COLOURS),
            )
            for in_time in (config.level1_temporal, config.level2_temporal)
        )
        self.norm_out = norm(base)
        self.conv_out = FrameConv2d(base, 8 * COLOURS)
        self.inverse_wavelet_tranform_l1 = Haar(in_time=config.level1_temporal, inverse=True)
        self.inverse_wavelet_tranform_l2 = Haar(in_time=config.level2_temporal, inverse=True)

    def forward(self, latent_BCFHW: Tensor, chunk: Chunk | None = None) -> tuple[Tensor, Coefficients]:
        h, side = self._split(self.mid(self.conv_in(latent_BCFHW, chunk), chunk))
        level2 = self.connect_l2(side, chunk)
        low2 = self.inverse_wavelet_tranform_l2(level2, chunk)
        h, side = self._split(self.up2(h, chunk))
        level1 = self._add_low_band(self.connect_l1(side, chunk), low2, "low2", chunk)
        low1 = self.inverse_wavelet_tranform_l1(level1, chunk)
        h = self.layer(self.up1(h, chunk), chunk)
        bands_BCFHW = self.conv_out(F.silu(self.norm_out(h)))
        return self._add_low_band(bands_BCFHW, low1, "low1", chunk), Coefficients(level1, level2)

    def _split(self, h_BCFHW: Tensor) -> tuple[Tensor, Tensor]:
        """The main path, and the channels of the side branch behind it."""
        return h_BCFHW[:, : -self.flow], h_BCFHW[:, -self.flow :]

    @staticmethod
    def _add_low_band(bands_BCFHW: Tensor, low_BCFHW: Tensor, name: str, chunk: Chunk | None) -> Tensor:
        if chunk is not None:
            low_BCFHW = chunk.align(name, low_BCFHW, bands_BCFHW.shape[2])
        return join_channels([bands_BCFHW[:, :COLOURS] + low_BCFHW, bands_BCFHW[:, COLOURS:]])


def _build_middle(config: WFVAEConfig, widths: Sequence[int]) -> Layers:
    (before, inside, after), norm = widths, norm_of(config)
    attention = [FrameAttention(inside, norm)] if config.attention else []
    return Layers(ResBlock3D(before, inside, norm), *attention, ResBlock3D(inside, after, norm))


class Layers(nn.Sequential):
    """Layers in a row that run on the same chunk."""

    def forward(self, x_BCFHW: Tensor, chunk: Chunk | None = None) -> Tensor:
        for layer in self:
            x_BCFHW = layer(x_BCFHW, chunk)
        return x_BCFHW


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of every position; images or clips."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = self.norm(x.movedim(1, -1))
        return normal.movedim(-1, 1)


def norm_of(config: WFVAEConfig) -> Norm:
    return ChannelNorm if config.norm == "layernorm" else partial(nn.GroupNorm, _NORM_GROUPS, eps=NORM_EPS)


class Upsample3D(nn.Module):
    """Twice the height and width, by linear interpolation, and twice the frames except for the first: 2n + 1."""

    def __init__(self, channels: int, time_interpolation: Interpolation) -> None:
        super().__init__()
        self.is_linear = time_interpolation == "trilinear"
        self.conv = CausalConv3d(channels, channels)

    def forward(self, x_BCFHW: Tensor, chunk: Chunk | None = None) -> Tensor:
        has_first = chunk is None or chunk.leads
        has_last = chunk is None or chunk.is_last
        past = chunk.recall(self) if chunk is not None else None
        num_new = x_BCFHW.shape[2] - has_first
        if self.is_linear and chunk is not None and not has_last and num_new:
            chunk.keep(self, x_BCFHW[:, :, -1:])
        if past is not None:
            x_BCFHW = join_frames([past, x_BCFHW])
        rows = _doubling_rows(
            x_BCFHW.shape[2], linear=self.is_linear, first=has_first, last=has_last, past=past is not None
        )
        weights = x_BCFHW.new_tensor(rows)
        frames_BFHWC = x_BCFHW.movedim(1, -1)
        doubled_BFN = torch.matmul(weights, frames_BFHWC.flatten(2))
        batch, _, *rest = frames_BFHWC.shape
        x_BCFHW = doubled_BFN.reshape(batch, len(rows), *rest).movedim(-1, 1)
        doubled = F.interpolate(fold_frames(x_BCFHW), scale_factor=2.0, mode="bilinear", align_corners=False)
        result: Tensor = self.conv(unfold_frames(doubled, x_BCFHW.shape[2]), chunk)
        return result


def _doubling_rows(num_frames: int, *, linear: bool, first: bool, last: bool, past: bool) -> list[list[float]]:
    """Output frames as weighted sums of input frames, one row each.

    The clip's first frame stands alone. The others are interpolated among themselves with half-pixel centres:
    between neighbours a and b lie 3/4 a + 1/4 b and 1/4 a + 3/4 b, and each end repeats its frame. With `past`, input 0
    is the last frame of the chunk before, which is already out. Without `last`, the end waits for the next chunk.
    """
    start = 1 if first else 0
    shares: list[dict[int, float]] = [{0: 1.0}] if first else []
    if not linear:
        shares += [{frame: 1.0} for frame in range(start, num_frames) for _ in range(2)]
    else:
        if start < num_frames and not past:
            shares.append({start: 1.0})
        for frame in range(start, num_frames - 1):
            shares += [{frame: 0.75, frame + 1: 0.25}, {frame: 0.25, frame + 1: 0.75}]
        if start < num_frames and last:
            shares.append({num_frames - 1: 1.0})
    return [[share.get(frame, 0.0) for frame in range(num_frames)] for share in shares]


def join_channels(pieces_BCFHW: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.movedim(1, -1) for piece in pieces_BCFHW], dim=-1).movedim(-1, 1)
