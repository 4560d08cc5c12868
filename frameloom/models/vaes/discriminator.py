"""A 3D PatchGAN: says for every patch of a clip how real it looks. Keys are those of Open-Sora-Plan's checkpoints.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from frameloom.core.random import stream
from frameloom.models.fit import load_fitting

_MOST_WIDENING = 8
_SPREAD = 0.02
# Time is halved by the first two layers only; later ones look at the frames as they are.
_LAYERS_OVER_TIME = 2


@dataclass(frozen=True)
class DiscriminatorConfig:
    """`num_layers` counts the convolutions with a batch norm; Open-Sora-Plan 1.3 has 4 of them, 1.2 has 3."""

    in_channels: int = 3
    channels: int = 64
    num_layers: int = 4


class Discriminator3D(nn.Module):
    """Logits [B, 1, F', H', W'] of a clip: above 0 is real.

    Every layer but the last two halves height and width. Batch norms use the statistics of the batch while training, so
    real and made-up clips must be given apart, and each pass moves the running statistics.
    """

    def __init__(self, config: DiscriminatorConfig | None = None) -> None:
        super().__init__()
        self.config = config or DiscriminatorConfig()
        num_layers, channels = self.config.num_layers, self.config.channels
        widths = [channels * min(2**layer, _MOST_WIDENING) for layer in range(num_layers + 1)]
        layers: list[nn.Module] = [
            nn.Conv3d(self.config.in_channels, channels, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
        ]
        for layer in range(1, num_layers + 1):
            space = 2 if layer < num_layers else 1
            time = space if layer < _LAYERS_OVER_TIME else 1
            layers += [
                nn.Conv3d(widths[layer - 1], widths[layer], 3, stride=(time, space, space), padding=1, bias=False),
                nn.BatchNorm3d(widths[layer]),
                nn.LeakyReLU(0.2, inplace=True),
            ]
        self.main = nn.Sequential(*layers, nn.Conv3d(widths[-1], 1, 3, padding=1))

    def forward(self, pixels_BCFHW: Tensor) -> Tensor:
        return cast(Tensor, self.main(pixels_BCFHW))


def build_discriminator(
    config: DiscriminatorConfig | None = None, generator: torch.Generator | None = None
) -> Discriminator3D:
    """Fresh weights as published: convolutions N(0, 0.02), norm scales N(1, 0.02), from `generator` alone."""
    model = Discriminator3D(config)
    if next(model.parameters()).is_meta:
        return model
    generator = generator or stream(0, "discriminator")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv3d):
                module.weight.normal_(0.0, _SPREAD, generator=generator)
                if module.bias is not None:
                    bound = module.weight[0].numel() ** -0.5
                    module.bias.uniform_(-bound, bound, generator=generator)
            elif isinstance(module, nn.BatchNorm3d):
                module.weight.normal_(1.0, _SPREAD, generator=generator)
                module.bias.zero_()
    return model


def load_discriminator(model: Discriminator3D, tensors: Mapping[str, Tensor]) -> None:
    """Published weights, also from a checkpoint that keeps them below `discriminator.`; CheckpointError otherwise."""
    given = {key.removeprefix("module.").removeprefix("discriminator."): value for key, value in tensors.items()}
    load_fitting(model, given, where="the discriminator's weights")
