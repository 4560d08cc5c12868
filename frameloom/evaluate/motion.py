"""How much a clip moves, and how much its still parts flicker: pixels alone, no network.

In the spirit of VBench's dynamic degree and temporal flickering (Huang et al. 2023), with block matching in the place
of optical flow. Pixels are uint8. Shape letters: C channels, F frames, H height, W width, N blocks.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

# A pixel that stays within so many of the 255 levels over the whole clip belongs to a still part.
STILL_LEVELS = 32.0
# Blocks overlap by half, so that an edge between two of them is inside of a third.
BLOCK_PX, STRIDE_PX, REACH_PX = 16, 8, 8
_SIDE_PX = 128  # larger pictures are made smaller before blocks are sought, so that REACH_PX reaches far enough
_TOP_SHARE = 0.05
# Cost in levels of a pixel of way: between matches that are alike, which noise would decide, the nearest wins.
_LEVELS_PER_PX = 0.1
# A block stays where it is unless another place fits better by this much; noise alone must not move it.
_LEVELS_TO_MOVE = 1.0
# A block whose levels lie closer together is plain: it is found anywhere, so it says nothing about motion.
_PLAIN_LEVELS = 48.0


def measure_flicker(pixels_CFHW: Tensor, *, still_levels: float = STILL_LEVELS) -> float | None:
    """Mean absolute difference of neighbouring frames in still parts, in levels of 255; 0 is best.

    None for a picture, and for a clip without still parts. A flicker stronger than `still_levels` counts as motion.
    """
    if pixels_CFHW.shape[1] < 2:
        return None
    video = pixels_CFHW.float()
    range_HW = (video.amax(1) - video.amin(1)).amax(0)
    is_still_HW = range_HW <= still_levels
    if not is_still_HW.any():
        return None
    change_HW = video.diff(dim=1).abs().mean(dim=(0, 1))
    return float(change_HW[is_still_HW].double().mean())


def measure_motion(pixels_CFHW: Tensor) -> float | None:
    """Pixels that the fastest twentieth of the picture moves in a frame, the mean over the clip; None for a picture.

    A shape of some blocks that moves k pixels a frame gives k. Moves beyond the reach of the search (8 pixels, or a
    sixteenth of a short side above 128) are told too small. None as well when a side is smaller than a block.
    """
    if pixels_CFHW.shape[1] < 2 or min(pixels_CFHW.shape[-2:]) < BLOCK_PX:
        return None
    video_FCHW = pixels_CFHW.float().transpose(0, 1)
    factor = max(1.0, min(video_FCHW.shape[-2:]) / _SIDE_PX)
    if factor > 1:
        height, width = (round(side / factor) for side in video_FCHW.shape[-2:])
        video_FCHW = F.interpolate(video_FCHW, (height, width), mode="bilinear", antialias=True, align_corners=False)
    pairs = pairwise(video_FCHW)
    return factor * sum(_fastest(match_blocks(before, after)) for before, after in pairs) / (len(video_FCHW) - 1)


def match_blocks(before_CHW: Tensor, after_CHW: Tensor) -> Tensor:
    """How far each block of `before` is found in `after`, in pixels: the place with the least absolute difference.

    Every place up to REACH_PX away is tried; a plain block counts as still. Rows and columns that do not fill a block
    are left out.
    """
    height, width = before_CHW.shape[-2:]
    # Places outside of the picture cost without end, so no block is found there.
    wide_CHW = F.pad(after_CHW, (REACH_PX,) * 4, value=float("inf"))
    best_N = distance_N = None
    for down in range(-REACH_PX, REACH_PX + 1):
        for right in range(-REACH_PX, REACH_PX + 1):
            length = (down**2 + right**2) ** 0.5
            top, left = REACH_PX + down, REACH_PX + right
            gap_HW = (wide_CHW[:, top : top + height, left : left + width] - before_CHW).abs().mean(0)
            cost_N = F.avg_pool2d(gap_HW[None], BLOCK_PX, STRIDE_PX).flatten() + (
                _LEVELS_PER_PX * length if length else -_LEVELS_TO_MOVE
            )
            if best_N is None or distance_N is None:
                best_N, distance_N = cost_N, torch.full_like(cost_N, length)
                continue
            is_better_N = cost_N < best_N
            best_N = torch.where(is_better_N, cost_N, best_N)
            distance_N = torch.where(is_better_N, length, distance_N)
    assert distance_N is not None
    high_CN, low_CN = (F.max_pool2d(sign * before_CHW, BLOCK_PX, STRIDE_PX).flatten(1) for sign in (1, -1))
    return torch.where((high_CN + low_CN).amax(0) < _PLAIN_LEVELS, 0.0, distance_N)


def _fastest(distance_N: Tensor) -> float:
    count = max(1, round(_TOP_SHARE * len(distance_N)))
    return float(distance_N.topk(count).values.double().mean())
