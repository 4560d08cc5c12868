"""Layers of the CogVideoX autoencoder, and the chunks of frames that they run on.

Shape letters: B batch, C channels, F frames, H height, W width.

A chunk reads what the one before wrote and writes for the one after, never to the same place. So a block that is
recomputed in a backward pass finds what it found the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.layers.patches import fold_frames, unfold_frames

# Of the norms for which the published config has no number.
NORM_EPS = 1e-6
_PAST_FRAMES = 2


class CausalConv3d(nn.Module):
    """3 x 3 x 3, zeros around the picture, the past before the first frame."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, 3, padding=(0, 1, 1))

    def forward(self, x_BCFHW: Tensor, chunk: Chunk) -> Tensor:
        out: Tensor = self.conv(chunk.prepend_past(x_BCFHW, self, _PAST_FRAMES))
        return out


class PointConv3d(nn.Module):
    """1 x 1 x 1, with the level that published names have."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, 1)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        out: Tensor = self.conv(x_BCFHW)
        return out


class PlainNorm(nn.GroupNorm):
    """The encoder's norm; it takes what the decoder's takes."""

    def __init__(self, groups: int, channels: int, eps: float = NORM_EPS) -> None:
        super().__init__(groups, channels, eps=eps)

    def forward(self, x_BCFHW: Tensor, latent_BCFHW: Tensor | None = None, chunk: Chunk | None = None) -> Tensor:
        return super().forward(x_BCFHW)


class LatentNorm(nn.Module):
    """The decoder's norm: its scale and offset follow from the latent at the same place."""

    def __init__(self, groups: int, channels: int, latent_channels: int) -> None:
        super().__init__()
        self.norm_layer = nn.GroupNorm(groups, channels, eps=NORM_EPS)
        self.conv_y = PointConv3d(latent_channels, channels)
        self.conv_b = PointConv3d(latent_channels, channels)

    def forward(self, x_BCFHW: Tensor, latent_BCFHW: Tensor, chunk: Chunk) -> Tensor:
        scale_BCFHW, offset_BCFHW = self.conv_y(latent_BCFHW), self.conv_b(latent_BCFHW)
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
        self.norm1 = build_norm(groups, in_channels, latent_channels, eps)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = build_norm(groups, out_channels, latent_channels, eps)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.conv_shortcut = nn.Conv3d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x_BCFHW: Tensor, latent_BCFHW: Tensor | None, chunk: Chunk) -> Tensor:
        h: Tensor = self.conv1(F.silu(self.norm1(x_BCFHW, latent_BCFHW, chunk)), chunk)
        h = self.conv2(F.silu(self.norm2(h, latent_BCFHW, chunk)), chunk)
        if self.conv_shortcut is not None:
            x_BCFHW = self.conv_shortcut(x_BCFHW)
        return x_BCFHW + h


def build_norm(groups: int, channels: int, latent_channels: int, eps: float) -> nn.Module:
    return LatentNorm(groups, channels, latent_channels) if latent_channels else PlainNorm(groups, channels, eps)


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


class Chunk:
    """What layers may ask about the chunk that they are given.

    `leads` says that it begins with the frame that a causal model keeps apart; `is_last`, that nothing follows.
    """

    def __init__(self, before: Chunk | None, *, leads: bool, is_last: bool) -> None:
        self.leads = leads
        self.is_last = is_last
        self._read: dict[Hashable, Tensor] = {} if before is None else before._written
        self._written: dict[Hashable, Tensor] = {}

    def prepend_past(self, x_BCFHW: Tensor, owner: Hashable, num_frames: int) -> Tensor:
        """`x_BCFHW` behind the `num_frames` that came before it; at the start of a clip, copies of its first frame."""
        # Without gradients nothing is read twice, and each memory can go as soon as it was used.
        past = self._read.get(owner) if torch.is_grad_enabled() else self._read.pop(owner, None)
        if past is None:
            past = x_BCFHW[:, :, :1].expand(-1, -1, num_frames, -1, -1)
        joined = torch.cat([past, x_BCFHW], dim=2)
        if not self.is_last:
            # A slice would hold the whole chunk in memory.
            self._written[owner] = joined[:, :, -num_frames:].clone()
        return joined


Layers = Callable[[Tensor, Chunk], Tensor]


def run_in_chunks(layers: Layers, x_BCFHW: Tensor, bounds: Sequence[int], *, leads: bool) -> Tensor:
    """Apply `layers` to the frames between neighbouring `bounds`; `leads` is said of the first chunk."""
    results: list[Tensor] = []
    chunk: Chunk | None = None
    for start, stop in pairwise(bounds):
        chunk = Chunk(chunk, leads=leads and start == 0, is_last=stop == bounds[-1])
        results.append(layers(x_BCFHW[:, :, start:stop], chunk))
    return torch.cat(results, dim=2)


def bounds_with_rest_first(num_frames: int, size: int) -> list[int]:
    """Chunks of `size`; what is left over goes into the first one."""
    return [0, *range(size + num_frames % size, num_frames, size), num_frames]


def bounds_with_first_alone(num_frames: int, size: int) -> list[int]:
    """The first frame alone, then chunks of `size`; what is left over is the last one."""
    return [0, *range(1, num_frames, size), num_frames]
