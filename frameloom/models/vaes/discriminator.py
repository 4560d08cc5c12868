"""PatchGAN discriminators in 3-D and 2-D, for adversarial training of autoencoders.

The 3-D one has the keys of Open-Sora-Plan's and Open-Sora's checkpoints, the 2-D one those of Stable Diffusion's
(Isola et al. 2017).

Shape letters: B batch, C channels, F frames, H height, W width, N pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frameloom.core.random import stream
from frameloom.models.layers.patches import fold_frames
from frameloom.models.state_dict import load_fitting

_MOST_WIDENING = 8
_STD = 0.02
# Time is halved by the first two layers only; later ones look at the frames as they are.
_LAYERS_OVER_TIME = 2
_SLOPE = 0.2


@dataclass(frozen=True)
class DiscriminatorConfig:
    """`num_layers` counts the convolutions with a batch norm; Open-Sora-Plan 1.3 has 4 of them, 1.2 has 3, Open-Sora 2
    has 5 with a dropout of 0.3."""

    in_channels: int = 3
    channels: int = 64
    num_layers: int = 4
    dropout: float = 0.0
    kind: Literal["3d", "2d"] = "3d"

    @property
    def widths(self) -> list[int]:
        return [self.channels * min(2**layer, _MOST_WIDENING) for layer in range(self.num_layers + 1)]


class Dropout(nn.Module):
    """Drops numbers by draws of a generator that the caller brings; without one it does nothing."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        if not self.training or generator is None:
            return x
        kept = torch.rand(x.shape, generator=generator, device=generator.device).to(x.device) >= self.share
        return x * kept / (1 - self.share)


class Discriminator(nn.Module):
    """Logits of a clip: above 0 is real. Of kind "3d" they are [B, 1, F', H', W'], and of kind "2d" [B * F, 1, H', W'],
    of each frame by itself. Every layer but the last two halves height and width.

    Batch norms use the statistics of the batch while training, so real and made-up clips must be given apart, and each
    pass moves the running statistics. With dropout, `generator` says which numbers are dropped.
    """

    def __init__(self, config: DiscriminatorConfig) -> None:
        super().__init__()
        self.config = config
        is_3d, widths, num_layers = config.kind == "3d", config.widths, config.num_layers
        kernel = 3 if is_3d else 4
        conv: Any = partial(nn.Conv3d if is_3d else nn.Conv2d, kernel_size=kernel, padding=1)
        layers: list[nn.Module] = [conv(config.in_channels, widths[0], stride=2), nn.LeakyReLU(_SLOPE, inplace=True)]
        for layer in range(1, num_layers + 1):
            space = 2 if layer < num_layers else 1
            time = space if layer < _LAYERS_OVER_TIME else 1
            stride = (time, space, space) if is_3d else space
            layers += [
                conv(widths[layer - 1], widths[layer], stride=stride, bias=False),
                nn.BatchNorm3d(widths[layer]) if is_3d else nn.BatchNorm2d(widths[layer]),
                nn.LeakyReLU(_SLOPE, inplace=True),
                *([Dropout(config.dropout)] if config.dropout else []),
            ]
        self.main = nn.Sequential(*layers, conv(widths[-1], 1))

    def forward(self, pixels_BCFHW: Tensor, generator: torch.Generator | None = None) -> Tensor:
        x = pixels_BCFHW if self.config.kind == "3d" else fold_frames(pixels_BCFHW)
        for layer in self.main:
            x = layer(x, generator) if isinstance(layer, Dropout) else layer(x)
        return x


def build_discriminator(
    config: DiscriminatorConfig | None = None, generator: torch.Generator | None = None
) -> Discriminator:
    """Fresh weights as published: convolutions N(0, 0.02), norm scales N(1, 0.02), from `generator` alone."""
    model = Discriminator(config or DiscriminatorConfig())
    if next(model.parameters()).is_meta:
        return model
    generator = generator or stream(0, "discriminator")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv3d | nn.Conv2d):
                module.weight.normal_(0.0, _STD, generator=generator)
                if module.bias is not None:
                    bound = module.weight[0].numel() ** -0.5
                    module.bias.uniform_(-bound, bound, generator=generator)
            elif isinstance(module, nn.BatchNorm3d | nn.BatchNorm2d):
                module.weight.normal_(1.0, _STD, generator=generator)
                module.bias.zero_()
    return model


def load_discriminator(model: Discriminator, tensors: Mapping[str, Tensor]) -> None:
    """Published weights, also from a checkpoint that keeps them below `discriminator.`; CheckpointError otherwise."""
    given = {key.removeprefix("module.").removeprefix("discriminator."): value for key, value in tensors.items()}
    load_fitting(model, given, where="the discriminator's weights")
