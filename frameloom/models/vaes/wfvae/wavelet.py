"""Haar wavelet transforms in 2-D and, causal in time, in 3-D.

Shape letters: B batch, C channels, F frames, H height, W width; M bands.

Bands are the outer and colours the inner channel index. The bands of 2-D are average, vertical difference, horizontal
difference, diagonal; those of 3-D have horizontal before vertical, then the same four again for the difference of
two frames. The 3-D taps are 0.3536 and not 1/sqrt(8), as published weights were trained with them: forward
and back multiplies by 1.00026. Each transform is one convolution whose weight is put together from the stored taps.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.layers.patches import fold_frames, unfold_frames
from frameloom.models.vaes.wfvae.blocks import FrameStream, prepend_past

BANDS_2D = ("aa", "ad", "da", "dd")
BANDS_3D = ("h", "g", "hh", "gh", "h_v", "g_v", "hh_v", "gh_v")
TAP_2D = 0.5
TAP_3D = 0.3536
_AXIS = ((1.0, 1.0), (1.0, -1.0))


def haar_taps_2d() -> Tensor:
    """[4, 2, 2]: band, row, column."""
    bands = [[[y * x for x in _AXIS[high_x]] for y in _AXIS[high_y]] for high_x, high_y in product((0, 1), repeat=2)]
    return torch.tensor(bands) * TAP_2D


def haar_taps_3d() -> Tensor:
    """[8, 2, 2, 2]: band, frame, row, column."""
    bands = [
        [[[f * y * x for x in _AXIS[high_x]] for y in _AXIS[high_y]] for f in _AXIS[high_f]]
        for high_f, high_y, high_x in product((0, 1), repeat=3)
    ]
    return torch.tensor(bands) * TAP_3D


def _spread_over_colours(taps: Tensor, num_colours: int) -> Tensor:
    """A convolution weight [bands * colours, colours, ...] that filters every colour by itself."""
    eye = torch.eye(num_colours, dtype=taps.dtype, device=taps.device)
    weight = torch.einsum("m...,cd->mcd...", taps, eye)
    return weight.flatten(0, 1)


def split_2d(x_BCFHW: Tensor, taps_MHW: Tensor) -> Tensor:
    """Four bands of half the height and width, frame by frame."""
    weight = _spread_over_colours(taps_MHW.to(x_BCFHW.dtype), x_BCFHW.shape[1])
    return unfold_frames(F.conv2d(fold_frames(x_BCFHW), weight, stride=2), x_BCFHW.shape[2])


def join_2d(bands_BCFHW: Tensor, taps_MHW: Tensor) -> Tensor:
    weight = _spread_over_colours(taps_MHW.to(bands_BCFHW.dtype), bands_BCFHW.shape[1] // len(taps_MHW))
    return unfold_frames(F.conv_transpose2d(fold_frames(bands_BCFHW), weight, stride=2), bands_BCFHW.shape[2])


def split_3d(x_BCFHW: Tensor, taps_MFHW: Tensor, owner: Hashable, stream: FrameStream | None) -> Tensor:
    """Eight bands; the first frame is paired with a copy of itself, so 2n + 1 frames give n + 1."""
    weight = _spread_over_colours(taps_MFHW.to(x_BCFHW.dtype), x_BCFHW.shape[1])
    return F.conv3d(prepend_past(x_BCFHW, owner, stream, kernel=2, stride=2), weight, stride=2)


def join_3d(bands_BCFHW: Tensor, taps_MFHW: Tensor, stream: FrameStream | None) -> Tensor:
    """Back to pixels, without the copy of the first frame: n + 1 frames give 2n + 1."""
    weight = _spread_over_colours(taps_MFHW.to(bands_BCFHW.dtype), bands_BCFHW.shape[1] // len(taps_MFHW))
    x_BCFHW = F.conv_transpose3d(bands_BCFHW, weight, stride=2)
    return x_BCFHW[:, :, 1:] if stream is None or stream.is_first else x_BCFHW


class _Taps(nn.Module):
    """One frozen filter under the name that a bias-free causal convolution has in the published weights."""

    def __init__(self, taps: Tensor) -> None:
        super().__init__()
        self.conv = nn.Module()
        self.conv.weight = nn.Parameter(taps, requires_grad=False)


class HaarSplit2D(nn.Module):
    bands = BANDS_2D

    def __init__(self) -> None:
        super().__init__()
        for name, taps_HW in zip(self.bands, haar_taps_2d(), strict=True):
            self.register_buffer(name, taps_HW[None, None].clone())

    def taps(self) -> Tensor:
        return torch.cat([getattr(self, name) for name in self.bands]).squeeze(1)

    def forward(self, x_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        return split_2d(x_BCFHW, self.taps())


class HaarJoin2D(HaarSplit2D):
    def forward(self, bands_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        return join_2d(bands_BCFHW, self.taps())


class HaarSplit3D(nn.Module):
    bands = BANDS_3D

    def __init__(self) -> None:
        super().__init__()
        for name, taps_FHW in zip(self.bands, haar_taps_3d(), strict=True):
            self.add_module(f"{name}_conv", _Taps(taps_FHW[None, None].clone()))

    def taps(self) -> Tensor:
        return torch.cat([self.get_parameter(f"{name}_conv.conv.weight") for name in self.bands]).squeeze(1)

    def forward(self, x_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        return split_3d(x_BCFHW, self.taps(), self, stream)


class HaarJoin3D(nn.Module):
    bands = BANDS_3D

    def __init__(self) -> None:
        super().__init__()
        for name, taps_FHW in zip(self.bands, haar_taps_3d(), strict=True):
            self.register_buffer(name, taps_FHW[None, None].clone())

    def taps(self) -> Tensor:
        return torch.cat([getattr(self, name) for name in self.bands]).squeeze(1)

    def forward(self, bands_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        return join_3d(bands_BCFHW, self.taps(), stream)
