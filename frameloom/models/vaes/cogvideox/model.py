"""The CogVideoX autoencoder: causal, run in chunks of frames, with latent-conditioned norms in the decoder.

Shape letters: B batch, C channels, F frames, H height, W width.

Strides are (4, 8, 8).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.layers.tiles import Cuts
from frameloom.models.layers.tiling import run_in_cuts
from frameloom.models.vaes.base import Moments, VideoVAE, load_same_keys
from frameloom.models.vaes.cogvideox.blocks import (
    NORM_EPS,
    CausalConv3d,
    Chunk,
    Downsample,
    LatentNorm,
    PlainNorm,
    ResBlock,
    Upsample,
    bounds_with_first_alone,
    bounds_with_rest_first,
    run_in_chunks,
)
from frameloom.models.vaes.cogvideox.config import CogVideoXConfig

COLOURS = 3
_MIDDLE_BLOCKS = 2
_STEPS_IN_TIME = 2


class CogVideoXVAE(VideoVAE):
    """Its keys are those of published files."""

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__(
            strides=config.strides,
            latent_channels=config.latent_channels,
            causal=config.causal,
            scale=config.scale,
            shift=config.shift,
        )
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        return Moments.from_raw(self.encode_raw(pixels_BCFHW))

    def encode_raw(self, pixels_BCFHW: Tensor) -> Tensor:
        """Means and unclamped log-variances, one behind the other in the channels; tiles fade before any sampling."""
        self.check_pixels(pixels_BCFHW)
        return run_in_cuts(self._encode_chunks, pixels_BCFHW, self.encode_cuts())

    def decode(self, latent_BCFHW: Tensor) -> Tensor:
        return run_in_cuts(self._decode_chunks, latent_BCFHW, self._cuts(decoding=True))

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, ResBlock)]

    def _encode_chunks(self, pixels_BCFHW: Tensor) -> Tensor:
        bounds = bounds_with_rest_first(pixels_BCFHW.shape[2], self.config.encode_chunk_frames)
        return run_in_chunks(self.encoder, pixels_BCFHW, bounds, leads=True)

    def _decode_chunks(self, latent_BCFHW: Tensor) -> Tensor:
        num_frames, size = latent_BCFHW.shape[2], self.config.decode_chunk_latents
        if self.config.decode_first_alone:
            return run_in_chunks(self.decoder, latent_BCFHW, bounds_with_first_alone(num_frames, size), leads=True)
        # Published programs see from an odd length that a chunk begins with the leading frame.
        bounds = bounds_with_rest_first(num_frames, size)
        return run_in_chunks(self.decoder, latent_BCFHW, bounds, leads=num_frames % 2 == 1)

    def encode_cuts(self) -> Cuts:
        return self._cuts(decoding=False)

    def _cuts(self, *, decoding: bool) -> Cuts:
        height, width = (self.config.tiles(side, decoding=decoding) for side in ("height", "width"))
        space = (height, width) if self.config.tiling else None
        return Cuts(space=space, one_by_one=self.config.one_by_one)


def load_original(model: VideoVAE, tensors: Mapping[str, Tensor]) -> None:
    load_same_keys(model, tensors, where="CogVideoX autoencoder weights")


class Encoder(nn.Module):
    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        widths, groups = config.block_channels, config.norm_groups
        self.conv_in = CausalConv3d(COLOURS, widths[0])
        self.down_blocks = nn.ModuleList()
        for level, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False)):
            resnets = _build_blocks(before, width, groups, config.layers_per_block, eps=config.norm_eps)
            is_last = level + 1 == len(widths)
            step = None if is_last else Downsample(width, in_time=level < _STEPS_IN_TIME)
            self.down_blocks.append(DownLevel(resnets, step))
        self.mid_block = Level(_build_blocks(widths[-1], widths[-1], groups, _MIDDLE_BLOCKS, eps=config.norm_eps))
        self.norm_out = PlainNorm(groups, widths[-1])
        self.conv_out = CausalConv3d(widths[-1], 2 * config.latent_channels)

    def forward(self, pixels_BCFHW: Tensor, chunk: Chunk) -> Tensor:
        h = self.conv_in(pixels_BCFHW, chunk)
        for level in self.down_blocks:
            h = level(h, None, chunk)
        h = self.mid_block(h, None, chunk)
        out: Tensor = self.conv_out(F.silu(self.norm_out(h)), chunk)
        return out


class Decoder(nn.Module):
    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        widths, groups, latents = config.block_channels[::-1], config.norm_groups, config.latent_channels
        self.conv_in = CausalConv3d(latents, widths[0])
        self.mid_block = Level(_build_blocks(widths[0], widths[0], groups, _MIDDLE_BLOCKS, latents))
        self.up_blocks = nn.ModuleList()
        for level, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False)):
            resnets = _build_blocks(before, width, groups, config.layers_per_block + 1, latents)
            is_last = level + 1 == len(widths)
            step = None if is_last else Upsample(width, in_time=level < _STEPS_IN_TIME)
            self.up_blocks.append(UpLevel(resnets, step))
        self.norm_out = LatentNorm(groups, widths[-1], latents)
        self.conv_out = CausalConv3d(widths[-1], COLOURS)

    def forward(self, latent_BCFHW: Tensor, chunk: Chunk) -> Tensor:
        h = self.conv_in(latent_BCFHW, chunk)
        h = self.mid_block(h, latent_BCFHW, chunk)
        for level in self.up_blocks:
            h = level(h, latent_BCFHW, chunk)
        out: Tensor = self.conv_out(F.silu(self.norm_out(h, latent_BCFHW, chunk)), chunk)
        return out


def _build_blocks(
    before: int, width: int, groups: int, depth: int, latent_channels: int = 0, eps: float = NORM_EPS
) -> list[ResBlock]:
    return [ResBlock(width if index else before, width, groups, latent_channels, eps) for index in range(depth)]


class Level(nn.Module):
    """Blocks of one resolution."""

    def __init__(self, resnets: list[ResBlock]) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(resnets)

    def forward(self, x_BCFHW: Tensor, latent_BCFHW: Tensor | None, chunk: Chunk) -> Tensor:
        for block in self.resnets:
            x_BCFHW = block(x_BCFHW, latent_BCFHW, chunk)
        return x_BCFHW


class DownLevel(Level):
    """With the step to the next level; the last one has none."""

    def __init__(self, resnets: list[ResBlock], step: Downsample | None) -> None:
        super().__init__(resnets)
        self.downsamplers = nn.ModuleList([] if step is None else [step])

    def forward(self, x_BCFHW: Tensor, latent_BCFHW: Tensor | None, chunk: Chunk) -> Tensor:
        x_BCFHW = super().forward(x_BCFHW, latent_BCFHW, chunk)
        for step in self.downsamplers:
            x_BCFHW = step(x_BCFHW, chunk)
        return x_BCFHW


class UpLevel(Level):
    """With the step to the next level; the last one has none."""

    def __init__(self, resnets: list[ResBlock], step: Upsample | None) -> None:
        super().__init__(resnets)
        self.upsamplers = nn.ModuleList([] if step is None else [step])

    def forward(self, x_BCFHW: Tensor, latent_BCFHW: Tensor | None, chunk: Chunk) -> Tensor:
        x_BCFHW = super().forward(x_BCFHW, latent_BCFHW, chunk)
        for step in self.upsamplers:
            x_BCFHW = step(x_BCFHW, chunk)
        return x_BCFHW
