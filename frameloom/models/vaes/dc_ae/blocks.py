"""Layers of the video DC-AE.

Shape letters: B batch, C channels, F frames, H height, W width, G heads, D head width, N cells.

Nothing is causal: convolutions are padded with zeros on both sides, in time too. Shortcuts around the steps between
stages have no weights: a coarse cell averages the channels of its fine cells, a fine cell repeats those of its coarse
one. A single frame is never halved or doubled in time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.vaes.dc_ae.config import HEAD_CHANNELS

NORM_EPS = 1e-5
ATTENTION_EPS = 1e-15


class ChannelRMSNorm(nn.Module):
    """Root mean square over the channels of each cell, in float32, then weight and bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        wide = x_BCFHW.to(torch.promote_types(x_BCFHW.dtype, torch.float32))
        rms = torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + NORM_EPS)
        shape = (-1, 1, 1, 1)
        return (wide * rms).to(x_BCFHW.dtype) * self.weight.view(shape) + self.bias.view(shape)


class ConvLayer(nn.Module):
    """A convolution and what follows it, under the names of published files."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel: int = 3,
        stride: tuple[int, int, int] = (1, 1, 1),
        groups: int = 1,
        bias: bool = True,
        norm: bool = False,
        act: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv3d(
            in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=bias
        )
        self.norm = ChannelRMSNorm(out_channels) if norm else None
        self.act = act

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        x_BCFHW = self.conv(x_BCFHW)
        if self.norm is not None:
            x_BCFHW = self.norm(x_BCFHW)
        return F.silu(x_BCFHW) if self.act else x_BCFHW


class Wrapped(nn.Module):
    """Only a level in the published names."""

    def __init__(self, main: nn.Module) -> None:
        super().__init__()
        self.main = main

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        out: Tensor = self.main(x_BCFHW)
        return out


class Residual(Wrapped):
    def forward(self, x_BCFHW: Tensor) -> Tensor:
        return super().forward(x_BCFHW) + x_BCFHW


class TwoConvs(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = ConvLayer(channels, channels, act=True)
        self.conv2 = ConvLayer(channels, channels, bias=False, norm=True)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        out: Tensor = self.conv2(self.conv1(x_BCFHW))
        return out


class LinearAttention(nn.Module):
    """ReLU attention over all cells of a clip, whose cost grows with their number and not with its square.

    A second set of heads looks at queries, keys and values that were averaged over 5 x 5 x 5 cells.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = 3 * channels
        self.qkv = ConvLayer(channels, inner, kernel=1, bias=False)
        self.aggreg = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv3d(inner, inner, 5, padding=2, groups=inner, bias=False),
                    nn.Conv3d(inner, inner, 1, groups=inner // HEAD_CHANNELS, bias=False),
                )
            ]
        )
        self.proj = ConvLayer(2 * channels, channels, kernel=1, bias=False, norm=True)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        size = x_BCFHW.shape[2:]
        qkv = self.qkv(x_BCFHW)
        qkv = torch.cat([qkv, self.aggreg[0](qkv)], dim=1)
        heads_BGDN = torch.unflatten(qkv.flatten(2), 1, (-1, 3 * HEAD_CHANNELS))
        out_BCN = _attend_linearly(*heads_BGDN.chunk(3, dim=2)).flatten(1, 2)
        out: Tensor = self.proj(torch.unflatten(out_BCN.to(x_BCFHW.dtype), 2, size))
        return out


def _attend_linearly(q_BGDN: Tensor, k_BGDN: Tensor, v_BGDN: Tensor) -> Tensor:
    """Products and division in float32: sums over all cells are too long for half precision."""
    dtype = torch.promote_types(q_BGDN.dtype, torch.float32)
    with _without_autocast(q_BGDN.device.type):
        q, k, v = F.relu(q_BGDN.to(dtype)), F.relu(k_BGDN.to(dtype)), v_BGDN.to(dtype)
        # A row of ones among the values collects the sum of the weights.
        context_BGDD = F.pad(v, (0, 0, 0, 1), value=1.0) @ k.transpose(-1, -2)
        weighted = context_BGDD @ q
        return weighted[:, :, :-1] / (weighted[:, :, -1:] + ATTENTION_EPS)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    # A run on the meta device, which has no autocast, finds shapes and costs.
    is_there = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if is_there else nullcontext()


class GatedConvs(nn.Module):
    """Widen, mix neighbours, let one half gate the other, narrow."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = 8 * channels
        self.inverted_conv = ConvLayer(channels, inner, kernel=1, act=True)
        self.depth_conv = ConvLayer(inner, inner, groups=inner)
        self.point_conv = ConvLayer(inner // 2, channels, kernel=1, bias=False, norm=True)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        values, gates = self.depth_conv(self.inverted_conv(x_BCFHW)).chunk(2, dim=1)
        out: Tensor = self.point_conv(values * F.silu(gates))
        return out


class ResBlock(Residual):
    def __init__(self, channels: int) -> None:
        super().__init__(TwoConvs(channels))


class AttentionBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.context_module = Residual(LinearAttention(channels))
        self.local_module = Residual(GatedConvs(channels))

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        out: Tensor = self.local_module(self.context_module(x_BCFHW))
        return out


class Downsample(Wrapped):
    """A strided convolution around a shortcut that averages."""

    def __init__(self, in_channels: int, out_channels: int, *, in_time: bool) -> None:
        super().__init__(ConvLayer(in_channels, out_channels, stride=(2 if in_time else 1, 2, 2)))
        self.out_channels = out_channels
        self.in_time = in_time

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        is_halved = self.in_time and x_BCFHW.shape[2] > 1
        cells = fold_cells(x_BCFHW, (2 if is_halved else 1, 2, 2))
        return super().forward(x_BCFHW) + average_channels(cells, self.out_channels)


class EnlargedConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, *, in_time: bool) -> None:
        super().__init__()
        self.conv = ConvLayer(in_channels, out_channels)
        self.in_time = in_time

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        is_doubled = self.in_time and x_BCFHW.shape[2] > 1
        large = F.interpolate(x_BCFHW, scale_factor=(2.0 if is_doubled else 1.0, 2.0, 2.0), mode="nearest")
        out: Tensor = self.conv(large)
        return out


class Upsample(Wrapped):
    """Nearest neighbours and a convolution around a shortcut that repeats."""

    def __init__(self, in_channels: int, out_channels: int, *, in_time: bool) -> None:
        super().__init__(EnlargedConv(in_channels, out_channels, in_time=in_time))
        self.out_channels = out_channels
        self.in_time = in_time

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        factors = (2 if self.in_time and x_BCFHW.shape[2] > 1 else 1, 2, 2)
        num_cells = 4 * factors[0]
        repeated = repeat_channels(x_BCFHW, self.out_channels * num_cells)
        return super().forward(x_BCFHW) + unfold_cells(repeated, factors)


def average_channels(x_BCFHW: Tensor, out_channels: int) -> Tensor:
    """Means of consecutive channels."""
    return torch.unflatten(x_BCFHW, 1, (out_channels, -1)).mean(dim=2)


def repeat_channels(x_BCFHW: Tensor, out_channels: int) -> Tensor:
    return x_BCFHW.repeat_interleave(out_channels // x_BCFHW.shape[1], dim=1)


def fold_cells(x_BCFHW: Tensor, factors: tuple[int, int, int]) -> Tensor:
    """Neighbouring cells become channels: behind each channel its cells in time, height and width, in this order."""
    time, height, width = factors
    # From the back, so that dimensions in front keep their numbers.
    split = torch.unflatten(torch.unflatten(x_BCFHW, 4, (-1, width)), 3, (-1, height))
    split = torch.unflatten(split, 2, (-1, time))
    return split.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)


def unfold_cells(x_BCFHW: Tensor, factors: tuple[int, int, int]) -> Tensor:
    """The inverse of `fold_cells`."""
    split = torch.unflatten(x_BCFHW, 1, (-1, *factors))
    return split.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)
