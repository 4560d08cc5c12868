"""The CogVideoX autoencoder: causal, run in chunks of frames, with latent-conditioned norms in the decoder.

Shape letters: B batch, C channels, F frames, H height, W width.

Strides are (4, 8, 8).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.layers.causal_conv import CausalConv3d, Chunk, run_in_chunks
from frameloom.models.layers.patches import fold_frames, unfold_frames
from frameloom.models.vaes.base import VideoVAE
from frameloom.models.vaes.blocks import COLOURS, NORM_EPS
from frameloom.models.vaes.cogvideox.config import CogVideoXConfig

# The published config has no number for most norms: those have NORM_EPS.
_MIDDLE_BLOCKS = 2
_STEPS_IN_TIME = 2


class CogVideoXVAE(VideoVAE):
    """Its keys are those of published files."""

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__(config)
        self.block_types = (ResBlock,)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def encode_piece(self, pixels_BCFHW: Tensor) -> Tensor:
        bounds = bounds_with_rest_first(pixels_BCFHW.shape[2], self.config.encode_chunk_frames)
        return run_in_chunks(self.encoder, pixels_BCFHW, bounds)

    def decode_piece(self, latent_BCFHW: Tensor) -> Tensor:
        num_frames, size = latent_BCFHW.shape[2], self.config.decode_chunk_latents
        if self.config.decode_first_alone:
            return run_in_chunks(self.decoder, latent_BCFHW, [0, *range(1, num_frames, size), num_frames])
        # Published programs see from an odd length that a chunk begins with the leading frame.
        bounds = bounds_with_rest_first(num_frames, size)
        return run_in_chunks(self.decoder, latent_BCFHW, bounds, leads=num_frames % 2 == 1)


def bounds_with_rest_first(num_frames: int, size: int) -> list[int]:
    """Chunks of `size`; what is left over goes into the first one."""
    return [0, *range(size + num_frames % size, num_frames, size), num_frames]


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
            self.down_blocks.append(Level(resnets, down=step))
        self.mid_block = Level(_build_blocks(widths[-1], widths[-1], groups, _MIDDLE_BLOCKS, eps=config.norm_eps))
        self.norm_out = _build_norm(groups, widths[-1], 0, NORM_EPS)
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
            self.up_blocks.append(Level(resnets, up=step))
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
    """Blocks of one resolution, then the step to the next, which the last one does not have."""

    def __init__(self, resnets: list[ResBlock], *, down: nn.Module | None = None, up: nn.Module | None = None) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(resnets)
        self.downsamplers = nn.ModuleList([down] if down is not None else [])
        self.upsamplers = nn.ModuleList([up] if up is not None else [])

    def forward(self, x_BCFHW: Tensor, latent_BCFHW: Tensor | None, chunk: Chunk) -> Tensor:
        for block in self.resnets:
            x_BCFHW = block(x_BCFHW, latent_BCFHW, chunk)
        for step in (*self.downsamplers, *self.upsamplers):
            x_BCFHW = step(x_BCFHW, chunk)
        return x_BCFHW


class LatentNorm(nn.Module):
    """The decoder's norm: its scale and offset follow from the latent at the same place."""

    def __init__(self, groups: int, channels: int, latent_channels: int) -> None:
        super().__init__()
        self.norm_layer = nn.GroupNorm(groups, channels, eps=NORM_EPS)
        self.conv_y = CausalConv3d(latent_channels, channels, 1)
        self.conv_b = CausalConv3d(latent_channels, channels, 1)

    def forward(self, x_BCFHW: Tensor, latent_BCFHW: Tensor, chunk: Chunk) -> Tensor:
        scale_BCFHW, offset_BCFHW = self.conv_y(latent_BCFHW, chunk), self.conv_b(latent_BCFHW, chunk)
        return modulate(self.norm_layer(x_BCFHW), scale_BCFHW, offset_BCFHW, leads=chunk.leads)


def modulate(x_BCFHW: Tensor, scale_BCFHW: Tensor, offset_BCFHW: Tensor, *, leads: bool) -> Tensor:
    """x * scale + offset, where one cell of scale and offset serves all the cells of x that grew from it.

    The published layer enlarges the latent first. To enlarge nothing gives the same and saves two tensors as large
    as x.
    """
    if leads and x_BCFHW.shape[2] != scale_BCFHW.shape[2]:
        parts = zip(*(part.tensor_split((1,), dim=2) for part in (x_BCFHW, scale_BCFHW, offset_BCFHW)), strict=True)
        return torch.cat([modulate(*part, leads=False) for part in parts], dim=2)
    num_frames, height, width = scale_BCFHW.shape[2:]
    # From the back, so that dimensions in front keep their numbers.
    grown = torch.unflatten(torch.unflatten(x_BCFHW, 4, (width, -1)), 3, (height, -1))
    grown = torch.unflatten(grown, 2, (num_frames, -1))
    scale, offset = (part[:, :, :, None, :, None, :, None] for part in (scale_BCFHW, offset_BCFHW))
    return (grown * scale + offset).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class ResBlock(nn.Module):
    """Without `latent_channels` it is a block of the encoder, and `eps` counts."""

    def __init__(
        self, in_channels: int, out_channels: int, groups: int, latent_channels: int = 0, eps: float = NORM_EPS
    ) -> None:
        super().__init__()
        self.norm1 = _build_norm(groups, in_channels, latent_channels, eps)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = _build_norm(groups, out_channels, latent_channels, eps)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.conv_shortcut = nn.Conv3d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x_BCFHW: Tensor, latent_BCFHW: Tensor | None, chunk: Chunk) -> Tensor:
        cond = () if latent_BCFHW is None else (latent_BCFHW, chunk)
        h: Tensor = self.conv1(F.silu(self.norm1(x_BCFHW, *cond)), chunk)
        h = self.conv2(F.silu(self.norm2(h, *cond)), chunk)
        if self.conv_shortcut is not None:
            x_BCFHW = self.conv_shortcut(x_BCFHW)
        return x_BCFHW + h


def _build_norm(groups: int, channels: int, latent_channels: int, eps: float) -> nn.Module:
    if latent_channels:
        return LatentNorm(groups, channels, latent_channels)
    return nn.GroupNorm(groups, channels, eps=eps)


class Downsample(nn.Module):
    """Means of two frames, then a strided convolution on each."""

    def __init__(self, channels: int, *, in_time: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)
        self.in_time = in_time

    def forward(self, x_BCFHW: Tensor, chunk: Chunk) -> Tensor:
        if self.in_time:
            lead = int(chunk.leads)
            pairs = torch.unflatten(x_BCFHW[:, :, lead:], 2, (-1, 2)).mean(dim=3)
            x_BCFHW = torch.cat([x_BCFHW[:, :, :lead], pairs], dim=2)
        pictures = self.conv(F.pad(fold_frames(x_BCFHW), (0, 1, 0, 1)))
        return unfold_frames(pictures, x_BCFHW.shape[2])


class Upsample(nn.Module):
    """Nearest neighbours, then a convolution on each frame; the frame that leads a clip is not doubled."""

    def __init__(self, channels: int, *, in_time: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.in_time = in_time

    def forward(self, x_BCFHW: Tensor, chunk: Chunk) -> Tensor:
        num_frames, height, width = x_BCFHW.shape[2:]
        if self.in_time:
            num_frames = 2 * num_frames - int(chunk.leads)
        enlarged_BCFHW = enlarge(x_BCFHW, (num_frames, 2 * height, 2 * width), leads=chunk.leads)
        return unfold_frames(self.conv(fold_frames(enlarged_BCFHW)), num_frames)


def enlarge(x_BCFHW: Tensor, size: tuple[int, ...] | torch.Size, *, leads: bool) -> Tensor:
    """Nearest neighbours up to `size` (frames, height, width); a leading frame stays one frame."""
    num_frames, height, width = size
    if not leads or num_frames == x_BCFHW.shape[2]:
        return F.interpolate(x_BCFHW, size=(num_frames, height, width))
    first = F.interpolate(x_BCFHW[:, :, :1], size=(1, height, width))
    rest = F.interpolate(x_BCFHW[:, :, 1:], size=(num_frames - 1, height, width))
    return torch.cat([first, rest], dim=2)
