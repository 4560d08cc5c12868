"""Blocks of several autoencoders; module and parameter names are those of the published state dicts.

Shape letters: B batch, C channels, F frames, H height, W width, N positions.

A layer takes (x_BCFHW, chunk); without a chunk the whole clip is there at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.layers.attention.attention import attend
from frameloom.models.layers.causal_conv import CausalConv3d, Chunk
from frameloom.models.layers.patches import fold_frames, unfold_frames

COLOURS = 3
NORM_EPS = 1e-6
Norm = Callable[[int], nn.Module]
"""a norm layer of so many channels"""


class FrameConv2d(nn.Conv2d):
    """A 3x3 convolution of every frame."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1)

    def forward(self, x_BCFHW: Tensor, chunk: Chunk | None = None) -> Tensor:
        return unfold_frames(super().forward(fold_frames(x_BCFHW)), x_BCFHW.shape[2])


class ResBlock2D(nn.Module):
    """Every frame by itself, its norms too."""

    def __init__(self, in_channels: int, out_channels: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x_BCFHW: Tensor, chunk: Chunk | None = None) -> Tensor:
        x = fold_frames(x_BCFHW)
        h = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return unfold_frames(h + (x if self.nin_shortcut is None else self.nin_shortcut(x)), x_BCFHW.shape[2])


class ResBlock3D(nn.Module):
    """With causal convolutions. Group norms span all frames, so chunks do not give the result of the whole clip."""

    def __init__(self, in_channels: int, out_channels: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(in_channels)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = norm(out_channels)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.nin_shortcut = CausalConv3d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x_BCFHW: Tensor, chunk: Chunk | None = None) -> Tensor:
        h: Tensor = self.conv1(F.silu(self.norm1(x_BCFHW)), chunk)
        h = self.conv2(F.silu(self.norm2(h)), chunk)
        return (x_BCFHW if self.nin_shortcut is None else self.nin_shortcut(x_BCFHW)) + h


class FrameAttention(nn.Module):
    """Single-head attention among the positions of one frame.

    With `mixes_frames` it is the block of the first CausalVAE, whose memory layout is read wrongly: a "frame" there is
    a run of channels of several frames. Weights that were trained with it need it.
    """

    def __init__(self, channels: int, norm: Norm, *, mixes_frames: bool = False) -> None:
        super().__init__()
        self.mixes_frames = mixes_frames
        self.norm = norm(channels)
        self.q = CausalConv3d(channels, channels, 1)
        self.k = CausalConv3d(channels, channels, 1)
        self.v = CausalConv3d(channels, channels, 1)
        self.proj_out = CausalConv3d(channels, channels, 1)

    def forward(self, x_BCFHW: Tensor, chunk: Chunk | None = None) -> Tensor:
        batch, channels, frames, height, width = x_BCFHW.shape
        normal = self.norm(x_BCFHW)
        qkv = [project(normal) for project in (self.q, self.k, self.v)]
        # [B, F, N, C]: frames take the place of heads, so they do not see each other.
        if self.mixes_frames:
            tokens = [part.reshape(batch, frames, channels, height * width).mT for part in qkv]
            mixed_BCFHW = attend(*tokens).mT.reshape(x_BCFHW.shape)
        else:
            tokens = [part.movedim(1, -1).flatten(2, 3) for part in qkv]
            mixed_BCFHW = attend(*tokens).reshape(batch, frames, height, width, channels).movedim(-1, 1)
        change_BCFHW: Tensor = self.proj_out(mixed_BCFHW)
        return x_BCFHW + change_BCFHW


class Downsample2D(nn.Module):
    """Half the height and width, frame by frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x_BCFHW: Tensor, chunk: Chunk | None = None) -> Tensor:
        return unfold_frames(self.conv(F.pad(fold_frames(x_BCFHW), (0, 1, 0, 1))), x_BCFHW.shape[2])


class Downsample3D(nn.Module):
    """Half the height and width, with `in_time` half the frames, too: 2n + 1 frames become n + 1."""

    def __init__(self, channels: int, *, in_time: bool = True) -> None:
        super().__init__()
        kernel, stride = (3 if in_time else 1, 3, 3), (2 if in_time else 1, 2, 2)
        self.conv = CausalConv3d(channels, channels, kernel, stride=stride, padding=0)

    def forward(self, x_BCFHW: Tensor, chunk: Chunk | None = None) -> Tensor:
        result: Tensor = self.conv(F.pad(x_BCFHW, (0, 1, 0, 1)), chunk)
        return result


class Upsample2D(nn.Module):
    """Twice the height and width, by repetition. `conv_3d`: the kernel is kept as one of a single frame."""

    def __init__(self, channels: int, *, conv_3d: bool = False) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels, (1, 3, 3)) if conv_3d else FrameConv2d(channels, channels)

    def forward(self, x_BCFHW: Tensor, chunk: Chunk | None = None) -> Tensor:
        doubled = F.interpolate(fold_frames(x_BCFHW), scale_factor=2.0, mode="nearest")
        result: Tensor = self.conv(unfold_frames(doubled, x_BCFHW.shape[2]), chunk)
        return result
