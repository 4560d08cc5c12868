"""The video DC-AE of Open-Sora 2.0: deterministic, not causal, compressing 32 times in space and 4 times in time.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from frameloom.core.errors import DataError
from frameloom.models.vaes.base import LOGVAR_RANGE, Moments, VideoVAE, load_same_keys
from frameloom.models.vaes.dc_ae.blocks import (
    AttentionBlock,
    ChannelRMSNorm,
    ConvLayer,
    Downsample,
    ResBlock,
    Upsample,
    Wrapped,
    average_channels,
    repeat_channels,
)
from frameloom.models.vaes.dc_ae.config import DCAEConfig

COLOURS = 3
INIT_STD = 0.02


class DCAE(VideoVAE):
    """`encode` gives moments whose log-variance is the lowest there is: a sample differs from the mean by a standard
    deviation of 3e-7, which is the rounding of float32, and vanishes in half precision."""

    def __init__(self, config: DCAEConfig) -> None:
        super().__init__(config)
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

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, ResBlock | AttentionBlock)]


def load_original(model: VideoVAE, tensors: Mapping[str, Tensor]) -> None:
    load_same_keys(model, tensors, where="DC-AE weights")


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
            self.stages.append(OpList(layers))
        self.project_out = Wrapped(OpList([ConvLayer(widths[-1], config.latent_channels)]))

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
        self.project_in = Wrapped(ConvLayer(config.latent_channels, widths[-1]))
        self.stages = nn.ModuleList()
        for stage, depth in enumerate(config.decoder_depths):
            layers = _build_blocks(config, stage, depth)
            if stage + 1 < len(widths):
                in_time = config.halves_frames[stage]
                layers.insert(0, Upsample(widths[stage + 1], widths[stage], in_time=in_time))
            self.stages.append(OpList(layers))
        self.project_out = OpList([ChannelRMSNorm(widths[0]), nn.ReLU(), ConvLayer(widths[0], COLOURS)])

    def forward(self, latent_BCFHW: Tensor) -> Tensor:
        h = self.project_in(latent_BCFHW) + repeat_channels(latent_BCFHW, self.width_in)
        for stage in reversed(self.stages):
            h = stage(h)
        out: Tensor = self.project_out(h)
        return out


class OpList(nn.Module):
    """Layers in a row, under the names of published files."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.op_list = nn.ModuleList(layers)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        for layer in self.op_list:
            x_BCFHW = layer(x_BCFHW)
        return x_BCFHW


def _build_blocks(config: DCAEConfig, stage: int, depth: int) -> list[nn.Module]:
    kind = AttentionBlock if config.attention[stage] else ResBlock
    return [kind(config.widths[stage]) for _ in range(depth)]
