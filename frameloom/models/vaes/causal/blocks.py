"""Layers of the CausalVAE; module and parameter names are those of the published state dict.

Shape letters: B batch, C channels, F frames, H height, W width, N positions.

Before the first frame of a clip there are copies of it, never zeros; padding in space is zeros. Group norms of 3-D
blocks span all frames of a clip, so a clip in pieces does not give the result of the whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.layers.attention.attention import attend
from frameloom.models.layers.patches import fold_frames, unfold_frames

NORM_EPS = 1e-6
_START_MIX = 2.0


def repeat_first(x_BCFHW: Tensor, count: int) -> Tensor:
    """`count` copies of the first frame before it."""
    if not count:
        return x_BCFHW
    return torch.cat([x_BCFHW[:, :, :1].expand(-1, -1, count, -1, -1), x_BCFHW], dim=2)


def build_norm(channels: int, groups: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups, channels, eps=NORM_EPS)


class FrameConv2d(nn.Conv2d):
    """A 3x3 convolution of every frame."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        return unfold_frames(super().forward(fold_frames(x_BCFHW)), x_BCFHW.shape[2])


class CausalConv3d(nn.Module):
    """A convolution that sees the current and earlier frames."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: tuple[int, int, int] = (3, 3, 3),
        *,
        stride: tuple[int, int, int] = (1, 1, 1),
        padding: int = 1,
    ) -> None:
        super().__init__()
        self.num_past = kernel[0] - 1
        self.conv = nn.Conv3d(in_channels, out_channels, kernel, stride=stride, padding=(0, padding, padding))

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        result: Tensor = self.conv(repeat_first(x_BCFHW, self.num_past))
        return result


def build_pointwise(in_channels: int, out_channels: int) -> CausalConv3d:
    return CausalConv3d(in_channels, out_channels, (1, 1, 1), padding=0)


class ResnetBlock3D(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = build_norm(in_channels, groups)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = build_norm(out_channels, groups)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.nin_shortcut = build_pointwise(in_channels, out_channels) if in_channels != out_channels else None

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        h: Tensor = self.conv1(F.silu(self.norm1(x_BCFHW)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (x_BCFHW if self.nin_shortcut is None else self.nin_shortcut(x_BCFHW))


class ResnetBlock2D(nn.Module):
    """Every frame by itself, its norms too."""

    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = build_norm(in_channels, groups)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = build_norm(out_channels, groups)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        x = fold_frames(x_BCFHW)
        h = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return unfold_frames(h + (x if self.nin_shortcut is None else self.nin_shortcut(x)), x_BCFHW.shape[2])


class FrameAttention(nn.Module):
    """Single-head attention among the positions of one frame.

    With `mixes_frames` it is the block of the first version, whose memory layout is read wrongly: a "frame" there is a
    run of channels of several frames. Weights that were trained with it need it.
    """

    def __init__(self, channels: int, groups: int, *, mixes_frames: bool) -> None:
        super().__init__()
        self.mixes_frames = mixes_frames
        self.norm = build_norm(channels, groups)
        self.q = build_pointwise(channels, channels)
        self.k = build_pointwise(channels, channels)
        self.v = build_pointwise(channels, channels)
        self.proj_out = build_pointwise(channels, channels)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        normal = self.norm(x_BCFHW)
        q, k, v = (self._to_tokens(project(normal)) for project in (self.q, self.k, self.v))
        mixed_BCN = attend(q, k, v).squeeze(1).mT
        change: Tensor = self.proj_out(self._to_clip(mixed_BCN, x_BCFHW))
        return x_BCFHW + change

    def _to_tokens(self, x_BCFHW: Tensor) -> Tensor:
        """[B * F, 1, N, C]"""
        batch, channels, frames, height, width = x_BCFHW.shape
        pictures = x_BCFHW if self.mixes_frames else x_BCFHW.transpose(1, 2)
        return pictures.reshape(batch * frames, channels, height * width).mT.unsqueeze(1)

    def _to_clip(self, pictures_BCN: Tensor, like_BCFHW: Tensor) -> Tensor:
        if self.mixes_frames:
            return pictures_BCN.reshape(like_BCFHW.shape)
        return unfold_frames(torch.unflatten(pictures_BCN, 2, like_BCFHW.shape[3:]), like_BCFHW.shape[2])


class Downsample(nn.Module):
    """Half the height and width, frame by frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        return unfold_frames(self.conv(F.pad(fold_frames(x_BCFHW), (0, 1, 0, 1))), x_BCFHW.shape[2])


class SpatialDownsample2x(nn.Module):
    """The same, with its kernel kept as a 3-D one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels, (1, 3, 3), stride=(1, 2, 2), padding=0)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        result: Tensor = self.conv(F.pad(x_BCFHW, (0, 1, 0, 1)))
        return result


class Spatial2xTime2x3DDownsample(nn.Module):
    """Half the frames, height and width: 2n + 1 frames become n + 1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels, stride=(2, 2, 2), padding=0)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        result: Tensor = self.conv(F.pad(x_BCFHW, (0, 1, 0, 1)))
        return result


class TimeDownsample2x(nn.Module):
    """The mean of three frames at every second one: 2n + 1 frames become n + 1."""

    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        return F.avg_pool3d(repeat_first(x_BCFHW, 2), (3, 1, 1), stride=(2, 1, 1))


class _Mixed(nn.Module):
    """Part of the plain result, part of a convolution; the share is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.mix_factor = nn.Parameter(torch.full((1,), _START_MIX))

    def mix(self, plain: Tensor, convolved: Tensor) -> Tensor:
        share = torch.sigmoid(self.mix_factor)
        return share * plain + (1 - share) * convolved


class TimeDownsampleRes2x(_Mixed):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, channels, 3, stride=(2, 1, 1), padding=(0, 1, 1))

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        x_BCFHW = repeat_first(x_BCFHW, 2)
        return self.mix(F.avg_pool3d(x_BCFHW, (3, 1, 1), stride=(2, 1, 1)), self.conv(x_BCFHW))


class SpatialUpsample2x(nn.Module):
    """Twice the height and width, by repetition."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels, (1, 3, 3))

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        doubled = F.interpolate(fold_frames(x_BCFHW), scale_factor=2.0, mode="nearest")
        result: Tensor = self.conv(unfold_frames(doubled, x_BCFHW.shape[2]))
        return result


def _interpolate(x_BCFHW: Tensor, *, space: float) -> Tensor:
    """The first frame alone, the others twice as many: n + 1 frames become 2n + 1. Linear in time and space."""
    first, rest = x_BCFHW[:, :, :1], x_BCFHW[:, :, 1:]
    parts = [first]
    if space != 1.0:
        parts = [F.interpolate(first, scale_factor=(1.0, space, space), mode="trilinear")]
    if rest.shape[2]:
        parts.append(F.interpolate(rest, scale_factor=(2.0, space, space), mode="trilinear"))
    return torch.cat(parts, dim=2)


class Spatial2xTime2x3DUpsample(nn.Module):
    """Twice the height and width, and the frames but for the first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        result: Tensor = self.conv(_interpolate(x_BCFHW, space=2.0))
        return result


class TimeUpsample2x(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        return _interpolate(x_BCFHW, space=1.0)


class TimeUpsampleRes2x(_Mixed):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        x_BCFHW = _interpolate(x_BCFHW, space=1.0)
        return self.mix(x_BCFHW, self.conv(x_BCFHW))
