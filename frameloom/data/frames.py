"""Which frames of a clip are taken, and how a picture is scaled and cut to its bucket's size."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frameloom.core.errors import DataError

StartRule = Literal["first", "center", "random"]
START_RULES: tuple[StartRule, ...] = ("first", "center", "random")


def frame_indices(
    total: int, num_frames: int, interval: int, start_rule: StartRule, draw: float = 0.0
) -> NDArray[np.int64]:
    """Indices of `num_frames` frames spread over a window of `num_frames * interval`, in order, each once.

    `draw` in [0, 1) picks the start for the rule "random"; every window that fits can come up. (Open-Sora 2.0 never
    uses the last one.)
    """
    last_start = max(0, total - num_frames * interval)
    starts = {"first": 0, "center": last_start // 2, "random": int(draw * (last_start + 1))}
    start = starts[start_rule]
    return spread_frames(start, min(start + num_frames * interval, total), num_frames)


def spread_frames(start: int, end: int, num_frames: int) -> NDArray[np.int64]:
    """`num_frames` evenly spread indices from `start` to `end - 1`, both included, rounded down exactly."""
    if end - start < num_frames or num_frames < 1:
        raise DataError(f"{num_frames} frames wanted, the clip has {end - start} to choose from; check the manifest")
    steps = np.arange(num_frames, dtype=np.int64)
    return start + steps * (end - 1 - start) // max(num_frames - 1, 1)


class Cover(NamedTuple):
    """Scale to `height` x `width`, then cut the wanted size out at `top`, `left`."""

    height: int
    width: int
    top: int
    left: int


def cover(height: int, width: int, wanted_height: int, wanted_width: int) -> Cover:
    """The smallest scaling that covers the wanted size with the ratio kept, cut in the centre."""
    factor_height, factor_width = wanted_height / height, wanted_width / width
    if factor_height > factor_width:
        scaled = (wanted_height, max(wanted_width, round(width * factor_height)))
    else:
        scaled = (max(wanted_height, round(height * factor_width)), wanted_width)
    return Cover(*scaled, (scaled[0] - wanted_height) // 2, (scaled[1] - wanted_width) // 2)
