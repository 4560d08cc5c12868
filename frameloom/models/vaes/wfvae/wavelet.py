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

from frameloom.models.layers.causal_conv import Chunk, prepend_past
from frameloom.models.layers.patches import fold_frames, unfold_frames

BANDS = {False: ("aa", "ad", "da", "dd"), True: ("h", "g", "hh", "gh", "h_v", "g_v", "hh_v", "gh_v")}
"""by whether frames are halved, too"""
TAP_2D = 0.5
TAP_3D = 0.3536
_AXIS = ((1.0, 1.0), (1.0, -1.0))


def haar_taps(*, in_time: bool) -> Tensor:
    """[8, 2, 2, 2]: band, frame, row, column; without time [4, 2, 2]."""
    bands = [
        [[[f * y * x for x in _AXIS[high_x]] for y in _AXIS[high_y]] for f in _AXIS[high_f]]
        for high_f, high_y, high_x in product((0, 1) if in_time else (0,), (0, 1), (0, 1))
    ]
    taps = torch.tensor(bands)
    return taps * TAP_3D if in_time else taps[:, 0].mT.contiguous() * TAP_2D


def split_haar(x_BCFHW: Tensor, taps: Tensor, owner: Hashable, chunk: Chunk | None) -> Tensor:
    """Bands of half the height and width. With taps in time the first frame is paired with a copy of itself, so 2n + 1
    frames give n + 1; else each frame is split by itself."""
    weight = _spread_over_colours(taps.to(x_BCFHW.dtype), x_BCFHW.shape[1])
    if taps.ndim == 4:
        return F.conv3d(prepend_past(x_BCFHW, owner, chunk, kernel=2, stride=2, channels_last=True), weight, stride=2)
    return unfold_frames(F.conv2d(fold_frames(x_BCFHW), weight, stride=2), x_BCFHW.shape[2])


def join_haar(bands_BCFHW: Tensor, taps: Tensor, chunk: Chunk | None) -> Tensor:
    """The inverse, without the copy of the first frame: with taps in time n + 1 frames give 2n + 1."""
    weight = _spread_over_colours(taps.to(bands_BCFHW.dtype), bands_BCFHW.shape[1] // len(taps))
    if taps.ndim == 4:
        x_BCFHW = F.conv_transpose3d(bands_BCFHW, weight, stride=2)
        return x_BCFHW[:, :, 1:] if chunk is None or chunk.leads else x_BCFHW
    return unfold_frames(F.conv_transpose2d(fold_frames(bands_BCFHW), weight, stride=2), bands_BCFHW.shape[2])


def _spread_over_colours(taps: Tensor, num_colours: int) -> Tensor:
    """A convolution weight [bands * colours, colours, ...] that filters every colour by itself."""
    eye = torch.eye(num_colours).to(taps)
    return torch.einsum("m...,cd->mcd...", taps, eye).flatten(0, 1)


class Haar(nn.Module):
    """One level of the transform. Its taps are constants, under the names that published weights have for them: those
    of a split in time are frozen parameters of bias-free causal convolutions, all others are buffers."""

    def __init__(self, *, in_time: bool, inverse: bool = False) -> None:
        super().__init__()
        self.in_time, self.inverse = in_time, inverse
        for name, taps in zip(BANDS[in_time], haar_taps(in_time=in_time)[:, None, None], strict=True):
            if in_time and not inverse:
                filter_ = nn.Module()
                filter_.conv = nn.Module()
                filter_.conv.weight = nn.Parameter(taps.clone(), requires_grad=False)
                self.add_module(f"{name}_conv", filter_)
            else:
                self.register_buffer(name, taps.clone())

    def taps(self) -> Tensor:
        return torch.cat([*self.parameters(), *self.buffers()]).squeeze(1)

    def forward(self, x_BCFHW: Tensor, chunk: Chunk | None = None) -> Tensor:
        if self.inverse:
            return join_haar(x_BCFHW, self.taps(), chunk)
        return split_haar(x_BCFHW, self.taps(), self, chunk)
