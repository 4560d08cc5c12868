"""LPIPS (Zhang et al. 2018): perceptual distance of two pictures from VGG16 features, under the published keys.

Shape letters: N pictures, C channels, H height, W width. Pictures are in [-1, 1].
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from frameloom.models.state_dict import load_fitting

# Mean and standard deviation of ImageNet's colours, for pictures in [-1, 1].
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
# Convolutions of each slice as indices in VGG16's list of layers, and their width in units of the first slice's. Slices
# after the first begin with a pooling.
_SLICES = (((0, 2), 1), ((5, 7), 2), ((10, 12, 14), 4), ((17, 19, 21), 8), ((24, 26, 28), 8))
_CHANNELS = 64
_EPS = 1e-10


class LPIPS(nn.Module):
    """The distance of picture pairs, [N, 1, 1, 1]. It does not train, but gradients reach the pictures.

    `channels` is the width of the first slice, 64 in the published network.
    """

    def __init__(self, channels: int = _CHANNELS) -> None:
        super().__init__()
        self.scaling_layer = nn.Module()
        self.scaling_layer.register_buffer("shift", torch.tensor(_SHIFT).view(1, 3, 1, 1))
        self.scaling_layer.register_buffer("scale", torch.tensor(_SCALE).view(1, 3, 1, 1))
        self.net = nn.Sequential()
        before = 3
        for number, (indices, factor) in enumerate(_SLICES):
            # A slice of VGG16 ends behind its last ReLU, where LPIPS looks.
            layers = nn.Sequential()
            if number:
                layers.add_module(str(indices[0] - 1), nn.MaxPool2d(2))
            for index in indices:
                layers.add_module(str(index), nn.Conv2d(before, channels * factor, 3, padding=1))
                layers.add_module(str(index + 1), nn.ReLU())
                before = channels * factor
            self.net.add_module(f"slice{number + 1}", layers)
            # One weight for each channel; the published keys call it layer 1 behind a dropout, which is off.
            weigh = nn.Sequential(nn.Identity(), nn.Conv2d(channels * factor, 1, 1, bias=False))
            self.add_module(f"lin{number}", nn.Sequential(OrderedDict(model=weigh)))
        self.requires_grad_(False)

    def forward(self, first_NCHW: Tensor, second_NCHW: Tensor) -> Tensor:
        pairs = zip(self.features(first_NCHW), self.features(second_NCHW), strict=True)
        distances = [
            self.get_submodule(f"lin{number}")((_to_unit_length(a) - _to_unit_length(b)).square()).mean((2, 3), True)
            for number, (a, b) in enumerate(pairs)
        ]
        return torch.stack(distances).sum(0)

    def features(self, x_NCHW: Tensor) -> list[Tensor]:
        shift, scale = self.scaling_layer.buffers()
        x_NCHW = (x_NCHW - shift) / scale
        found = []
        for part in self.net:
            x_NCHW = part(x_NCHW)
            found.append(x_NCHW)
        return found


def _to_unit_length(x_NCHW: Tensor) -> Tensor:
    # vector_norm has gradient 0 where all channels are 0; the root of a sum of squares has none there.
    length_N1HW: Tensor = torch.linalg.vector_norm(x_NCHW, dim=1, keepdim=True)
    return x_NCHW / (length_N1HW + _EPS)


def load_lpips(model: LPIPS, tensors: Mapping[str, Tensor]) -> None:
    """Published weights, in one file or as torchvision's VGG16 with the heads beside it.

    The colour constants may be left out. VGG16's classifier, and the second names of the heads in files of the package
    `lpips`, are not looked at.
    """
    constants = {key: value for key, value in model.state_dict().items() if key.startswith("scaling_layer.")}
    used = [key for key in tensors if not key.startswith(("classifier.", "lins."))]
    slice_of = {index: number for number, (indices, _) in enumerate(_SLICES, start=1) for index in indices}
    given = {}
    for key in used:
        prefix, _, rest = key.partition(".")
        index, _, kind = rest.partition(".")
        is_vgg = prefix == "features" and index.isdigit()
        given[f"net.slice{slice_of.get(int(index), 0)}.{index}.{kind}" if is_vgg else key] = tensors[key]
    load_fitting(model, {**constants, **given}, where="the weights of LPIPS")
