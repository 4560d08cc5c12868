"""Resolution names, aspect ratios and the sizes behind them: one grammar for recipe checks and bucket policies.

A name stands for a pixel budget; each aspect ratio (written width:height) gets the size nearest to that budget
whose sides are multiples of the model's spatial stride. The rules are those of Open-Sora 2.0, order included,
because the first of two equally near ratios wins.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import NamedTuple

from frameloom.core.errors import ConfigError

ASPECT_RATIOS = ("2.39:1", "2:1", "16:9", "1.85:1", "9:16", "5:8", "3:2", "4:3", "1:1")
MAX_SIDE = 99_999
_NAME = re.compile(r"([1-9][0-9]*)(px|p)(?:_(?:(max)|ar([0-9.]+:[0-9.]+)))?")


class Size(NamedTuple):
    height: int
    width: int


def parse_resolution(name: str) -> tuple[int, str | None]:
    """(pixel budget, `max`, a ratio or None): `Npx` is a square of N, `Np` is N lines at 16:9."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"the resolution '{name}' is not known; write 256px (area of 256 x 256), 720p (16:9 of that height), "
            "256px_ar16:9 (one ratio) or 256px_max (the ratio with most pixels)"
        )
    side = int(match[1])
    if side > MAX_SIDE:
        raise ConfigError(f"the resolution '{name}' is too large; write at most {MAX_SIDE}{match[2]}, e.g. 256px")
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
        size = _size_of(ratio, budget, stride, training=training)
        if size is None:
            raise ConfigError(
                f"the resolution '{name}' is too small: at some ratio a side is smaller than one token of {stride} "
                f"pixels; use {2 * stride}px or more"
            )
        if training and size in table.values():
            continue
        table[ratio] = size
        transposed[":".join(reversed(ratio.split(":")))] = Size(size.width, size.height)
    table |= transposed
    if selection == "max":
        selection = max(table, key=lambda ratio: table[ratio].height * table[ratio].width)
    if selection is not None and selection not in table:
        raise ConfigError(f"the resolution '{name}' has no size of ratio {selection}; known ratios: {', '.join(table)}")
    return table if selection is None else {selection: table[selection]}


def _size_of(ratio: str, budget: int, stride: int, *, training: bool) -> Size | None:
    """The size of a ratio; None where a side would hold no token."""
    ratio_width, ratio_height = map(float, ratio.split(":"))
    width = int(math.sqrt(budget * (ratio_width / ratio_height)) / stride) * stride
    height = int(budget / width / stride) * stride if width else 0
    best = Size(height, width)
    if not all(best):
        return None
    for step_y, step_x in ((-stride, 0), (stride, 0), (0, -stride), (0, stride)) if training else ():
        other = Size(height + step_y, width + step_x)
        nearer = abs(other.height * other.width - budget) < abs(best.height * best.width - budget)
        if nearer and other.height > 0 and other.width > 0:
            best = other
    return best


def height_per_width(ratio: str) -> float:
    """The number behind a ratio's name, which is written width:height."""
    width, height = map(float, ratio.split(":"))
    return height / width


def ratio_name(height: int, width: int) -> str:
    """Width:height in lowest terms."""
    shared = math.gcd(height, width)
    return f"{width // shared}:{height // shared}"
