"""LPIPS (Zhang et al. 2018): how different two pictures look, from features of VGG16. Keys are the published ones.

Shape letters: N pictures, C channels, H height, W width. Pictures are in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from frameloom.models.fit import load_fitting

# Mean and spread of ImageNet's colours, for pictures in [-1, 1].
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
# Convolutions of each slice: (place in VGG16's list of layers, channels). Slices after the first begin with a pooling.
_SLICES = (
    ((0, 64), (2, 64)),
    ((5, 128), (7, 128)),
    ((10, 256), (12, 256), (14, 256)),
    ((17, 512), (19, 512), (21, 512)),
    ((24, 512), (26, 512), (28, 512)),
)
_EPS = 1e-10


class _Scaling(nn.Module):
    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(_SHIFT).view(1, 3, 1, 1))
        self.register_buffer("scale", torch.tensor(_SCALE).view(1, 3, 1, 1))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return (x_NCHW - self.shift) / self.scale


class VGG16Features(nn.Module):
    """Five slices of VGG16; each ends behind its last ReLU, where LPIPS looks."""

    def __init__(self) -> None:
        super().__init__()
        channels = 3
        for number, places in enumerate(_SLICES, start=1):
            layers = nn.Sequential()
            if number > 1:
                layers.add_module(str(places[0][0] - 1), nn.MaxPool2d(2))
            for place, width in places:
                layers.add_module(str(place), nn.Conv2d(channels, width, 3, padding=1))
                layers.add_module(str(place + 1), nn.ReLU())
                channels = width
            self.add_module(f"slice{number}", layers)

    def forward(self, x_NCHW: Tensor) -> list[Tensor]:
        features = []
        for part in self.children():
            x_NCHW = part(x_NCHW)
            features.append(x_NCHW)
        return features


class _Weights(nn.Module):
    """One weight for each channel; the published keys call it layer 1 behind a dropout, which is off."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Identity(), nn.Conv2d(channels, 1, 1, bias=False))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return cast(Tensor, self.model(x_NCHW))


class LPIPS(nn.Module):
    """The distance of picture pairs, [N, 1, 1, 1]. It does not train, but gradients reach the pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling_layer = _Scaling()
        self.net = VGG16Features()
        for number, places in enumerate(_SLICES):
            self.add_module(f"lin{number}", _Weights(places[-1][1]))
        self.requires_grad_(False)

    def forward(self, first_NCHW: Tensor, second_NCHW: Tensor) -> Tensor:
        pairs = zip(self.features(first_NCHW), self.features(second_NCHW), strict=True)
        distances = [
            self.get_submodule(f"lin{number}")((_to_unit_length(a) - _to_unit_length(b)).square()).mean((2, 3), True)
            for number, (a, b) in enumerate(pairs)
        ]
        return torch.stack(distances).sum(0)

    def features(self, x_NCHW: Tensor) -> list[Tensor]:
        return cast("list[Tensor]", self.net(self.scaling_layer(x_NCHW)))


def _to_unit_length(x_NCHW: Tensor) -> Tensor:
    # vector_norm has gradient 0 where all channels are 0; the root of a sum of squares has none there.
    length_N1HW: Tensor = torch.linalg.vector_norm(x_NCHW, dim=1, keepdim=True)
    return x_NCHW / (length_N1HW + _EPS)


def load_lpips(model: LPIPS, tensors: Mapping[str, Tensor]) -> None:
    """Published weights; the colour constants may be left out."""
    constants = {key: value for key, value in model.state_dict().items() if key.startswith("scaling_layer.")}
    load_fitting(model, {**constants, **tensors}, where="the weights of LPIPS")
