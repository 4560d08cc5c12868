"""Aspect ratios as height / width: the nearest of a list, for all rows at once, and the tables of CogVideoX-Fun."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Height / width to a size whose area is about 512 x 512.
RATIO_TABLE: dict[float, tuple[int, int]] = {
    **{0.25: (256, 1024), 0.26: (256, 992), 0.27: (256, 960), 0.28: (256, 928), 0.32: (288, 896), 0.33: (288, 864)},
    **{0.35: (288, 832), 0.4: (320, 800), 0.42: (320, 768), 0.48: (352, 736), 0.5: (352, 704), 0.52: (352, 672)},
    **{0.57: (384, 672), 0.6: (384, 640), 0.68: (416, 608), 0.72: (416, 576), 0.78: (448, 576), 0.82: (448, 544)},
    **{0.88: (480, 544), 0.94: (480, 512), 1.0: (512, 512), 1.07: (512, 480), 1.13: (544, 480), 1.21: (544, 448)},
    **{1.29: (576, 448), 1.38: (576, 416), 1.46: (608, 416), 1.67: (640, 384), 1.75: (672, 384), 2.0: (704, 352)},
    **{2.09: (736, 352), 2.4: (768, 320), 2.5: (800, 320), 2.89: (832, 288), 3.0: (864, 288), 3.11: (896, 288)},
    **{3.62: (928, 256), 3.75: (960, 256), 3.88: (992, 256), 4.0: (1024, 256)},
}
TABLE_SIDE = 512

# The ratios that `random_ratio_crop` draws from, with their weights.
CROP_WEIGHTS: dict[float, int] = {
    **{0.42: 1, 0.5: 2, 0.57: 4, 0.68: 4, 0.78: 4, 0.88: 4, 0.94: 8, 1.0: 8, 1.07: 8, 1.13: 4},
    **{1.29: 4, 1.46: 4, 1.75: 4, 2.0: 2, 2.4: 1},
}


def nearest_values(values: Sequence[float], wanted: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each number the position of the nearest value; the value that comes first in the list wins a tie."""
    rising, first = np.unique(np.asarray(values, dtype=np.float64), return_index=True)
    above = np.searchsorted(rising, wanted).clip(0, len(rising) - 1)
    below = (above - 1).clip(0)
    gap_below, gap_above = np.abs(rising[below] - wanted), np.abs(rising[above] - wanted)
    takes_below = (gap_below < gap_above) | ((gap_below == gap_above) & (first[below] < first[above]))
    return np.asarray(first[np.where(takes_below, below, above)], dtype=np.int64)


def draw_weighted(weights: Sequence[float], draws: NDArray[np.float64]) -> NDArray[np.int64]:
    """A position for each uniform draw in [0, 1), as often as its weight says."""
    edges = np.cumsum(np.asarray(weights, dtype=np.float64))
    edges /= edges[-1]
    return np.searchsorted(edges, draws, side="right").astype(np.int64)


def ratio_name(height: int, width: int) -> str:
    """Width:height in lowest terms."""
    shared = math.gcd(height, width)
    return f"{width // shared}:{height // shared}"
