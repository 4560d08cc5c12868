"""How the published training codes bring a picture to its size: bilinear, in floating point, on pixels in memory.

Runs do the same inside the decoder. Shape letters: C channels, F frames, H height, W width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from frameloom.data.media.transforms import ResizeCrop, Transforms


def apply_transforms(
    transforms: Transforms,
    pixels_CFHW: Tensor,
    height: int,
    width: int,
    *,
    draws: tuple[float, float] = (0.0, 0.0),
    antialias: bool = True,
    align_corners: bool = False,
) -> Tensor:
    """The steps of a recipe on bytes; the result is in [-1, 1]."""
    size = (pixels_CFHW.shape[2], pixels_CFHW.shape[3])
    if transforms.crops_first:
        box = transforms.source_box(*size, height, width)
        part = pixels_CFHW[:, :, box.top : box.top + box.height, box.left : box.left + box.width]
        return resize_and_cut(part, ResizeCrop(height, width, 0, 0), height, width, antialias, align_corners)
    place = transforms.place(*size, height, width, draws)
    return resize_and_cut(pixels_CFHW, place, height, width, antialias, align_corners)


def resize_and_cut(
    pixels_CFHW: Tensor, place: ResizeCrop, height: int, width: int, antialias: bool = True, align_corners: bool = False
) -> Tensor:
    """Bytes to [-1, 1] at a given place, bilinear in floating point."""
    frames_FCHW = pixels_CFHW.transpose(0, 1).float() / 255
    if frames_FCHW.shape[2:] != place[:2]:
        frames_FCHW = F.interpolate(
            frames_FCHW, place[:2], mode="bilinear", antialias=antialias, align_corners=align_corners
        )
    cut_FCHW = frames_FCHW[:, :, place.top : place.top + height, place.left : place.left + width]
    return (2 * cut_FCHW - 1).transpose(0, 1).contiguous()
