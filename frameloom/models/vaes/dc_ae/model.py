"""The video DC-AE of Open-Sora 2.0: deterministic, not causal, compressing 32 times in space and 4 times in time.

Shape letters: B batch, C channels, F frames, H height, W width, G heads, D head width, N cells.

Convolutions are padded with zeros on both sides, in time too. Shortcuts around the steps between stages have no
weights: a coarse cell averages the channels of its fine cells, a fine cell repeats those of its coarse one. A single
frame is never halved or doubled in time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.errors import DataError
from frameloom.models.vaes.base import LOGVAR_RANGE, Moments, VideoVAE
from frameloom.models.vaes.blocks import COLOURS
from frameloom.models.vaes.dc_ae.config import HEAD_CHANNELS, DCAEConfig

NORM_EPS = 1e-5
ATTENTION_EPS = 1e-15
INIT_STD = 0.02


class DCAE(VideoVAE):
    """`encode` gives moments whose log-variance is the lowest there is: a sample differs from the mean by a standard
    deviation of 3e-7, which is the rounding of float32, and vanishes in half precision."""

    def __init__(self, config: DCAEConfig) -> None:
        super().__init__(config)
        self.block_types = (ResBlock, AttentionBlock)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        draw_weights(self)

    def latent_frames(self, pixel_frames: int) -> int:
        """Two frames are one latent frame as well."""
        if pixel_frames == 2:
            return 1
        if not self.config.lengths.accepts(pixel_frames):
            raise DataError(
                f"clip of {pixel_frames} frames: this autoencoder takes 1, 2 or a multiple of {self.strides[0]}; cut "
                "or pad the clip"
            )
        return super().latent_frames(pixel_frames)

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        mean_BCFHW = self.encode_raw(pixels_BCFHW)
        return Moments(mean_BCFHW, torch.full_like(mean_BCFHW, LOGVAR_RANGE[0]))

    def encode_piece(self, pixels_BCFHW: Tensor) -> Tensor:
        """Means alone."""
        mean_BCFHW: Tensor = self.encoder(pixels_BCFHW)
        return mean_BCFHW

    def decode_piece(self, latent_BCFHW: Tensor) -> Tensor:
        """One latent frame gives one frame, whatever it was made from."""
        pixels_BCFHW: Tensor = self.decoder(latent_BCFHW)
        return pixels_BCFHW

    def encode_with_coefficients(self, pixels_BCFHW: Tensor) -> tuple[Moments, Sequence[Tensor]]:
        """For training; refuses clips that come back with another number of frames."""
        num_frames = pixels_BCFHW.shape[2]
        if num_frames > 1 and self.latent_frames(num_frames) == 1:
            raise DataError(
                f"clip of {num_frames} frames: it becomes one latent frame, which this autoencoder decodes to one "
                f"frame; train on single frames or on {2 * self.strides[0]} and more"
            )
        return super().encode_with_coefficients(pixels_BCFHW)

    def last_layer(self) -> nn.Parameter:
        weight = self.get_submodule("decoder.project_out.op_list.2.conv").weight
        assert isinstance(weight, nn.Parameter)
        return weight


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Weights from a normal distribution of standard deviation 0.02, biases zero, as published models start.

    Scales of norms are drawn likewise, so they start near 0 and residual branches near nothing.
    """
    for module in model.modules():
        if isinstance(module, ChannelRMSNorm | nn.Conv3d):
            module.weight.normal_(0.0, INIT_STD)
            if module.bias is not None:
                module.bias.zero_()


class Encoder(nn.Module):
    def __init__(self, config: DCAEConfig) -> None:
        super().__init__()
        self.latent_channels = config.latent_channels
        widths = config.widths
        self.project_in = ConvLayer(COLOURS, widths[0])
        self.stages = nn.ModuleList()
        for stage, depth in enumerate(config.encoder_depths):
            layers = _build_blocks(config, stage, depth)
            if stage + 1 < len(widths):
                in_time = config.halves_frames[stage]
                layers.append(Downsample(widths[stage], widths[stage + 1], in_time=in_time))
            self.stages.append(named(op_list=nn.Sequential(*layers)))
        self.project_out = named(main=named(op_list=nn.Sequential(ConvLayer(widths[-1], config.latent_channels))))

    def forward(self, pixels_BCFHW: Tensor) -> Tensor:
        h = self.project_in(pixels_BCFHW)
        for stage in self.stages:
            h = stage(h)
        projected: Tensor = self.project_out(h)
        return projected + average_channels(h, self.latent_channels)


class Decoder(nn.Module):
    """Stages are numbered as in the encoder, so they run from the last to the first."""

    def __init__(self, config: DCAEConfig) -> None:
        super().__init__()
        widths = config.widths
        self.width_in = widths[-1]
        self.project_in = named(main=ConvLayer(config.latent_channels, widths[-1]))
        self.stages = nn.ModuleList()
        for stage, depth in enumerate(config.decoder_depths):
            layers = _build_blocks(config, stage, depth)
            if stage + 1 < len(widths):
                in_time = config.halves_frames[stage]
                layers.insert(0, Upsample(widths[stage + 1], widths[stage], in_time=in_time))
            self.stages.append(named(op_list=nn.Sequential(*layers)))
        self.project_out = named(
            op_list=nn.Sequential(ChannelRMSNorm(widths[0]), nn.ReLU(), ConvLayer(widths[0], COLOURS))
        )

    def forward(self, latent_BCFHW: Tensor) -> Tensor:
        h = self.project_in(latent_BCFHW) + repeat_channels(latent_BCFHW, self.width_in)
        for stage in reversed(self.stages):
            h = stage(h)
        out: Tensor = self.project_out(h)
        return out


def _build_blocks(config: DCAEConfig, stage: int, depth: int) -> list[nn.Module]:
    kind = AttentionBlock if config.attention[stage] else ResBlock
    return [kind(config.widths[stage]) for _ in range(depth)]


def named(**layers: nn.Module) -> nn.Sequential:
    """Layers in a row, under the names of published files."""
    return nn.Sequential(OrderedDict(layers))


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


class Residual(nn.Module):
    def __init__(self, main: nn.Module) -> None:
        super().__init__()
        self.main = main

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        out: Tensor = self.main(x_BCFHW)
        return out + x_BCFHW


class ResBlock(Residual):
    def __init__(self, channels: int) -> None:
        conv1 = ConvLayer(channels, channels, act=True)
        super().__init__(named(conv1=conv1, conv2=ConvLayer(channels, channels, bias=False, norm=True)))


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
        device_type = x_BCFHW.device.type
        # A run on the meta device, which has no autocast, finds shapes and costs.
        has_autocast = torch.amp.is_autocast_available(device_type)
        with torch.autocast(device_type, enabled=False) if has_autocast else nullcontext():
            # Products and division in float32: sums over all cells are too long for half precision.
            wide = heads_BGDN.to(torch.promote_types(heads_BGDN.dtype, torch.float32))
            q_BGDN, k_BGDN, v_BGDN = wide.chunk(3, dim=2)
            # A row of ones among the values collects the sum of the weights.
            context_BGDD = F.pad(v_BGDN, (0, 0, 0, 1), value=1.0) @ F.relu(k_BGDN).transpose(-1, -2)
            weighted = context_BGDD @ F.relu(q_BGDN)
            out_BGDN = weighted[:, :, :-1] / (weighted[:, :, -1:] + ATTENTION_EPS)
        out: Tensor = self.proj(torch.unflatten(out_BGDN.flatten(1, 2).to(x_BCFHW.dtype), 2, size))
        return out


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


class AttentionBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.context_module = Residual(LinearAttention(channels))
        self.local_module = Residual(GatedConvs(channels))

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        out: Tensor = self.local_module(self.context_module(x_BCFHW))
        return out


class Downsample(nn.Module):
    """A strided convolution around a shortcut that averages."""

    def __init__(self, in_channels: int, out_channels: int, *, in_time: bool) -> None:
        super().__init__()
        self.main = ConvLayer(in_channels, out_channels, stride=(2 if in_time else 1, 2, 2))
        self.in_time, self.out_channels = in_time, out_channels

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        is_halved = self.in_time and x_BCFHW.shape[2] > 1
        cells = fold_cells(x_BCFHW, (2 if is_halved else 1, 2, 2))
        out: Tensor = self.main(x_BCFHW)
        return out + average_channels(cells, self.out_channels)


class Upsample(nn.Module):
    """Nearest neighbours and a convolution around a shortcut that repeats."""

    def __init__(self, in_channels: int, out_channels: int, *, in_time: bool) -> None:
        super().__init__()
        self.main = named(conv=ConvLayer(in_channels, out_channels))
        self.in_time, self.out_channels = in_time, out_channels

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        factors = (2 if self.in_time and x_BCFHW.shape[2] > 1 else 1, 2, 2)
        out: Tensor = self.main(F.interpolate(x_BCFHW, scale_factor=tuple(map(float, factors)), mode="nearest"))
        repeated = repeat_channels(x_BCFHW, self.out_channels * 4 * factors[0])
        return out + unfold_cells(repeated, factors)


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
