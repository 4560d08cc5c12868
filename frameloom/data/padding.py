"""Clips of several sizes in one batch: filled up to a common size, with a mask of the cells that hold picture.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from frameloom.core.errors import DataError

Size = tuple[int, int, int]


def round_up_size(size_FHW: Size, strides: Size, patch: Size) -> Size:
    """The next size that an autoencoder with these strides and a denoiser with these patches take.

    The autoencoder is causal: of its frames the first stands alone.
    """
    frames, height, width = size_FHW
    steps = [stride * cells for stride, cells in zip(strides, patch, strict=True)]
    whole = [-(-length // step) * step for length, step in zip((frames - 1, height, width), steps, strict=True)]
    return whole[0] + 1, whole[1], whole[2]


def latent_cells(size_FHW: Size, strides: Size) -> Size:
    """Latent cells that hold some of a clip's picture."""
    frames, height, width = size_FHW
    return -(-(frames - 1) // strides[0]) + 1, -(-height // strides[1]), -(-width // strides[2])


def pad_clips(clips_CFHW: Sequence[Tensor], size_FHW: Size, strides: Size) -> tuple[Tensor, Tensor]:
    """One batch of `size_FHW`, zeros (mid-grey in [-1, 1]) behind each clip's end, and its cells [B, F, H, W].

    A cell is 1 where at least a part of it is picture: what `Conditions.cells_BFHW` and a masked loss take.
    """
    cells = latent_cells(size_FHW, strides)
    pixels_BCFHW = torch.zeros(len(clips_CFHW), clips_CFHW[0].shape[0], *size_FHW)
    cells_BFHW = torch.zeros(len(clips_CFHW), *cells)
    for number, clip_CFHW in enumerate(clips_CFHW):
        _, frames, height, width = clip_CFHW.shape
        if frames > size_FHW[0] or height > size_FHW[1] or width > size_FHW[2]:
            raise DataError(
                f"clip {number} of a batch is {frames}x{height}x{width}, larger than the batch's "
                f"{'x'.join(map(str, size_FHW))}; raise the batch's size or cut the clip"
            )
        pixels_BCFHW[number, :, :frames, :height, :width] = clip_CFHW
        full = latent_cells((frames, height, width), strides)
        cells_BFHW[number, : full[0], : full[1], : full[2]] = 1
    return pixels_BCFHW, cells_BFHW
