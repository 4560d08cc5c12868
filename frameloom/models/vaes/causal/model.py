"""CausalVAE, the video autoencoder of Open-Sora-Plan 1.0 to 1.2: inflated from an image autoencoder, causal in time.

Shape letters: B batch, C channels, F frames, H height, W width.

Strides are (4, 8, 8) as published.

Tiling is the published one. In time, pieces share one frame, and the result of every piece but the first loses its
first frame. In space, tiles overlap by a share of their side and fade into each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.models.layers.tiles import Tiles
from frameloom.models.layers.tiling import run_in_spans, run_in_tiles
from frameloom.models.vaes.base import Moments, VideoVAE
from frameloom.models.vaes.causal import blocks
from frameloom.models.vaes.causal.blocks import (
    CausalConv3d,
    FrameAttention,
    FrameConv2d,
    ResnetBlock2D,
    ResnetBlock3D,
    build_norm,
    build_pointwise,
)
from frameloom.models.vaes.causal.config import CausalVAEConfig

COLOURS = 3
_ALL = 2**31
_RES_BLOCKS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "ResnetBlock3D": ResnetBlock3D,
    "ResnetBlock2D": ResnetBlock2D,
}


class CausalVAE(VideoVAE):
    def __init__(self, config: CausalVAEConfig) -> None:
        super().__init__(
            strides=config.strides,
            latent_channels=config.latent_channels,
            causal=config.causal,
            scale=config.scale,
            shift=config.shift,
        )
        self.config = config
        self._tiling: Tiling | None = None
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        if config.use_quant_layer:
            self.quant_conv = build_pointwise(2 * config.z_channels, 2 * config.embed_dim)
            self.post_quant_conv = build_pointwise(config.embed_dim, config.z_channels)

    def enable_tiling(self, tiling: Tiling) -> None:
        """Encode and decode in overlapping tiles where a clip is larger than one; memory no longer grows with it.

        The result is that of the published tiling, not of the whole clip: norms see one tile only, and seams are
        blended. `RELEASED` has the published sizes.
        """
        tiling.check(self.strides)
        self._tiling = tiling

    def disable_tiling(self) -> None:
        self._tiling = None

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        return Moments.from_raw(self.encode_raw(pixels_BCFHW))

    def encode_raw(self, pixels_BCFHW: Tensor) -> Tensor:
        """Means and unclamped log-variances, one behind the other in the channels."""
        self.check_pixels(pixels_BCFHW)
        if self._tiling is None:
            return self._encode_whole(pixels_BCFHW)
        return run_tiled(self._encode_whole, pixels_BCFHW, self._tiling.pixels, self._tiling.latents)

    def decode(self, latent_BCFHW: Tensor) -> Tensor:
        if self._tiling is None:
            return self._decode_whole(latent_BCFHW)
        return run_tiled(self._decode_whole, latent_BCFHW, self._tiling.latents, self._tiling.pixels)

    def encode_with_coefficients(self, pixels_BCFHW: Tensor) -> tuple[Moments, tuple[()]]:
        """For training: never in tiles, and without coefficients."""
        self.check_pixels(pixels_BCFHW)
        return Moments.from_raw(self._encode_whole(pixels_BCFHW)), ()

    def decode_with_coefficients(self, latent_BCFHW: Tensor) -> tuple[Tensor, tuple[()]]:
        return self._decode_whole(latent_BCFHW), ()

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, ResnetBlock2D | ResnetBlock3D)]

    def _encode_whole(self, pixels_BCFHW: Tensor) -> Tensor:
        raw_BCFHW: Tensor = self.encoder(pixels_BCFHW)
        return self.quant_conv(raw_BCFHW) if self.config.use_quant_layer else raw_BCFHW

    def _decode_whole(self, latent_BCFHW: Tensor) -> Tensor:
        h = self.post_quant_conv(latent_BCFHW) if self.config.use_quant_layer else latent_BCFHW
        pixels_BCFHW: Tensor = self.decoder(h)
        return pixels_BCFHW


class Encoder(nn.Module):
    """Pixels to raw moments."""

    def __init__(self, config: CausalVAEConfig) -> None:
        super().__init__()
        widths, groups = config.widths, config.norm_groups
        self.conv_in: nn.Module
        if config.encoder_conv_in == "Conv2d":
            self.conv_in = FrameConv2d(COLOURS, config.hidden_size)
        else:
            self.conv_in = CausalConv3d(COLOURS, config.hidden_size)
        self.down = nn.ModuleList()
        before = config.hidden_size
        for index, width in enumerate(widths):
            level = Level(config.encoder_resnet_blocks[index], (before, width), config.num_res_blocks, groups)
            level.add_resize("downsample", _build_resize(config.encoder_spatial_downsample[index], width))
            level.add_resize("time_downsample", _build_resize(config.encoder_temporal_downsample[index], width))
            self.down.append(level)
            before = width
        self.mid = Middle(widths[-1], config.encoder_attention, groups)
        self.norm_out = build_norm(widths[-1], groups)
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
        widths, groups = config.widths, config.norm_groups
        self.conv_in = CausalConv3d(config.z_channels, widths[-1])
        self.mid = Middle(widths[-1], config.decoder_attention, groups)
        levels = []
        before = widths[-1]
        for index in reversed(range(config.num_levels)):
            width = widths[index]
            level = Level(config.decoder_resnet_blocks[index], (before, width), config.num_res_blocks + 1, groups)
            level.add_resize("upsample", _build_resize(config.decoder_spatial_upsample[index], width))
            level.add_resize("time_upsample", _build_resize(config.decoder_temporal_upsample[index], width))
            levels.append(level)
            before = width
        self.up = nn.ModuleList(reversed(levels))
        self.norm_out = build_norm(widths[0], groups)
        self.conv_out = CausalConv3d(widths[0], COLOURS)

    def forward(self, latent_BCFHW: Tensor) -> Tensor:
        h: Tensor = self.mid(self.conv_in(latent_BCFHW))
        for level in reversed(self.up):
            h = level(h)
        pixels_BCFHW: Tensor = self.conv_out(F.silu(self.norm_out(h)))
        return pixels_BCFHW


class Level(nn.Module):
    """Residual blocks, then the resizing in space and in time that this level has; it is named by its direction."""

    def __init__(self, res_block: str, widths: tuple[int, int], num_blocks: int, groups: int) -> None:
        super().__init__()
        build = _RES_BLOCKS[res_block]
        before, inside = widths
        self.block = nn.ModuleList(build(inside if index else before, inside, groups) for index in range(num_blocks))
        self.resizes: list[str] = []

    def add_resize(self, name: str, layer: nn.Module | None) -> None:
        if layer is not None:
            self.add_module(name, layer)
            self.resizes.append(name)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        for block in self.block:
            x_BCFHW = block(x_BCFHW)
        for name in self.resizes:
            x_BCFHW = getattr(self, name)(x_BCFHW)
        return x_BCFHW


class Middle(nn.Module):
    def __init__(self, channels: int, attention: str, groups: int) -> None:
        super().__init__()
        self.block_1 = ResnetBlock3D(channels, channels, groups)
        self.attn_1 = FrameAttention(channels, groups, mixes_frames=attention == "AttnBlock3D")
        self.block_2 = ResnetBlock3D(channels, channels, groups)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        result: Tensor = self.block_2(self.attn_1(self.block_1(x_BCFHW)))
        return result


def _build_resize(name: str, channels: int) -> nn.Module | None:
    layer: nn.Module | None = getattr(blocks, name)(channels) if name else None
    return layer


class Tile(NamedTuple):
    """Largest frames and side of a tile, and the share of the side that neighbours have in common."""

    frames: int
    side: int
    overlap: float

    @property
    def step(self) -> int:
        return int(self.side * (1 - self.overlap))

    @property
    def blend(self) -> int:
        return int(self.side * self.overlap)


@dataclass(frozen=True)
class Tiling:
    """Tiles of pixels for the encoder, and of latents for the decoder. A clip no larger than one stays whole."""

    sample_side: int
    sample_frames: int
    latent_side: int
    latent_frames: int
    overlap: float

    @property
    def pixels(self) -> Tile:
        return Tile(self.sample_frames, self.sample_side, self.overlap)

    @property
    def latents(self) -> Tile:
        return Tile(self.latent_frames, self.latent_side, self.overlap)

    def check(self, strides: tuple[int, int, int]) -> None:
        """ConfigError unless tiles of pixels and of latents fit each other; the published code would cut wrongly."""
        frames, side, _ = strides
        if not 0 <= self.overlap < 1:
            raise ConfigError(f"tiling: overlap is {self.overlap}; choose at least 0 and less than 1")
        if self.sample_frames <= 1 or (self.sample_frames - 1) % frames or self.latent_frames <= 1:
            raise ConfigError(
                f"tiling: pieces of {self.sample_frames} frames and {self.latent_frames} latent frames; the first must "
                f"be 1 more than a multiple of {frames}, and both more than 1"
            )
        if self.sample_side != side * self.latent_side:
            raise ConfigError(
                f"tiling: tiles of {self.sample_side} pixels and {self.latent_side} latents; the first must be {side} "
                "times the second"
            )
        if self.pixels.step < side or self.pixels.step != side * self.latents.step:
            raise ConfigError(
                f"tiling: with overlap {self.overlap}, tiles of {self.sample_side} pixels start every "
                f"{self.pixels.step} pixels and every {self.latents.step} latents; change the overlap so that the "
                f"first is {side} times the second"
            )


# Sizes of the published classes. The pieces in time of encoder and decoder differ from version 1.2 on.
RELEASED: dict[str, Tiling] = {
    "v1.1": Tiling(sample_side=256, sample_frames=65, latent_side=32, latent_frames=17, overlap=0.25),
    "v1.2": Tiling(sample_side=256, sample_frames=33, latent_side=32, latent_frames=16, overlap=0.125),
}


def run_tiled(apply: Callable[[Tensor], Tensor], x_BCFHW: Tensor, source: Tile, result: Tile) -> Tensor:
    """`apply` on pieces and tiles of `source` size; `result` is the size of what it gives for one tile in space.

    A clip that is too large in any one way is cut in all of them, so even a side that one tile would hold gets a
    second tile when it is longer than the step.
    """
    frames, height, width = x_BCFHW.shape[2:]
    if frames <= source.frames and max(height, width) <= source.side:
        return apply(x_BCFHW)
    sides = Tiles(size=source.side, stride=source.step, keep=result.side - result.blend, blend=result.blend)
    shared = source.frames - 1
    # Pieces do not overlap but for the frame they share, so each is kept to its end.
    pieces = Tiles(size=shared, stride=shared, keep=_ALL, blend=0)
    return run_in_spans(lambda piece: run_in_tiles(apply, piece, sides, sides), x_BCFHW, pieces, lead=1)
