"""Resolution names, aspect ratios and the sizes behind them; clip lengths that a video autoencoder accepts.

A name stands for a pixel budget; each aspect ratio (written width:height) gets the size nearest to that budget
whose sides are multiples of the model's spatial stride. The rules are those of Open-Sora 2.0, order included,
because the first of two equally near ratios wins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from frameloom.core.errors import ConfigError

Ints = NDArray[np.int64]

ASPECT_RATIOS = ("2.39:1", "2:1", "16:9", "1.85:1", "9:16", "5:8", "3:2", "4:3", "1:1")
_NAME = re.compile(r"^([1-9][0-9]{0,4})(px|p)(?:_(?:(max)|ar([0-9.]+:[0-9.]+)))?$")


class Size(NamedTuple):
    height: int
    width: int


def parse_resolution(name: str) -> tuple[int, str | None]:
    """(pixel budget, `max`, a ratio or None): `Npx` is a square of N, `Np` is N lines at 16:9."""
    match = _NAME.match(name)
    if match is None:
        raise ConfigError(
            f"'{name}' is not a resolution; write 256px (a square's side), 480p (lines at 16:9), "
            "256px_ar16:9 (one ratio) or 256px_max (the ratio with most pixels)"
        )
    side = int(match[1])
    return side * side if match[2] == "px" else int(side * side * 16 / 9), match[3] or match[4]


@cache
def size_table(name: str, stride: int, *, training: bool = True) -> dict[str, Size]:
    """Ratio name to size for `name`, in matching order; do not change the returned dictionary.

    `stride` is the VAE's spatial stride times the patch size. Training tables search the neighbours for the size
    nearest to the budget and drop sizes that are there already; inference tables do neither.
    """
    budget, selection = parse_resolution(name)
    table: dict[str, Size] = {}
    transposed: dict[str, Size] = {}
    for ratio in ASPECT_RATIOS:
        size = _size_of(ratio, budget, stride, training, name)
        if training and size in table.values():
            continue
        table[ratio] = size
        transposed[":".join(reversed(ratio.split(":")))] = Size(size.width, size.height)
    table |= transposed
    return _select(table, selection, name)


def _size_of(ratio: str, budget: int, stride: int, training: bool, name: str) -> Size:
    ratio_width, ratio_height = map(float, ratio.split(":"))
    width = int(math.sqrt(budget * (ratio_width / ratio_height)) / stride) * stride
    height = int(budget / width / stride) * stride if width else 0
    if not (height and width):
        raise ConfigError(f"resolution '{name}' is too small for a spatial stride of {stride}; choose a larger one")
    best = Size(height, width)
    if training:
        for other in (
            Size(height - stride, width),
            Size(height + stride, width),
            Size(height, width - stride),
            Size(height, width + stride),
        ):
            nearer = abs(other.height * other.width - budget) < abs(best.height * best.width - budget)
            if nearer and other.height > 0 and other.width > 0:
                best = other
    return best


def _select(table: dict[str, Size], selection: str | None, name: str) -> dict[str, Size]:
    if selection is None:
        return table
    if selection == "max":
        ratio = max(table, key=lambda ratio: table[ratio].height * table[ratio].width)
        return {ratio: table[ratio]}
    if selection not in table:
        raise ConfigError(f"resolution '{name}': no size for ratio {selection}; known: {', '.join(table)}")
    return {selection: table[selection]}


def height_per_width(ratio: str) -> float:
    """The number behind a ratio's name, which is written width:height."""
    width, height = map(float, ratio.split(":"))
    return height / width


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
