"""Frame selection: which frames of a clip are read.

Everything here is a pure function of numbers; `draw` is always a uniform number in [0, 1) that the caller keyed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frameloom.core.errors import ConfigError, DataError

StartRule = Literal["first", "center", "random"]
START_RULES: tuple[StartRule, ...] = ("first", "center", "random")

# Closer rates count as equal: 23.976 fps is not thinned to 24.
SAME_RATE_FPS = 0.1


class Window(NamedTuple):
    """The frames of a file that belong to a clip: `start` up to, not including, `end`."""

    start: int
    end: int


@dataclass(frozen=True)
class FrameRule:
    """How frames are spaced. Without `stride` and `fps` they are spread over the window that the bucket policy counted.

    `stride` takes every n-th source frame, whatever the frame rate; `fps` takes the frames that play at that rate, also
    in fractional steps, and repeats frames of slower clips; `speed` above 1 (with `fps`) plays long clips faster, as
    far as their length allows. `skip_last_start` never uses the last possible start, as Open-Sora does.
    """

    disk_name: ClassVar[str] = "FrameRule"
    stride: int | None = None
    fps: float | None = None
    speed: float = 1.0
    skip_last_start: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.stride is not None and self.fps is not None:
            problems.append("frames: stride and fps exclude each other; give the one that the bucket policy counts by")
        if self.stride is not None and self.stride < 1:
            problems.append(f"frames: stride is {self.stride}; it must be 1 or more")
        if self.fps is not None and not self.fps > 0:
            problems.append(f"frames: fps is {self.fps}; it must be above 0")
        if self.speed < 1 or (self.speed > 1 and self.fps is None):
            problems.append(f"frames: speed is {self.speed}; it must be 1, or more together with fps")
        if problems:
            raise ConfigError(problems)


def clip_window(frames: int, start_frame: int | None = None, end_frame: int | None = None) -> Window:
    """The window of a manifest row: `frames` counts the clip's own frames, `start_frame` says where it begins in its
    file; an `end_frame` (not included) can only make it shorter."""
    start = start_frame or 0
    end = start + frames if end_frame is None else min(end_frame, start + frames)
    if start < 0 or end <= start:
        raise DataError(f"a window from frame {start} to {end} holds no frame; check start_frame and end_frame")
    return Window(start, end)


def select_frames(
    window: Window,
    num_frames: int,
    *,
    fps: float,
    interval: int = 1,
    rule: FrameRule | None = None,
    start_rule: StartRule = "first",
    draw: float = 0.0,
) -> NDArray[np.int64]:
    """Rising indices into the file, `num_frames` of them; with `rule.fps` above the clip's own rate some come twice.

    `interval` is used without stride and fps: a window of `num_frames * interval` frames is spread evenly.
    """
    rule = rule or FrameRule()
    length = window.end - window.start
    if rule.fps is not None:
        found = speed_up(resample_window(window, fps, rule.fps), rule.speed, num_frames)
        return _cut(found, num_frames, pick_start(len(found) - num_frames, start_rule, draw, rule.skip_last_start))
    if rule.stride is not None:
        last_start = length - ((num_frames - 1) * rule.stride + 1)
        start = pick_start(last_start, start_rule, draw, rule.skip_last_start)
        return _cut(np.arange(window.start + start, window.end, rule.stride, dtype=np.int64), num_frames, 0)
    last_start = max(0, length - num_frames * interval)
    start = window.start + pick_start(last_start, start_rule, draw, rule.skip_last_start)
    return spread_frames(start, min(start + num_frames * interval, window.end), num_frames)


def pick_start(last_start: int, rule: StartRule, draw: float, skip_last: bool = False) -> int:
    """A start from 0 to `last_start`, both included; `skip_last` leaves the last one out where there is another."""
    last = max(0, last_start - 1 if skip_last else last_start)
    return {"first": 0, "center": last // 2, "random": int(draw * (last + 1))}[rule]


def spread_frames(start: int, end: int, num_frames: int) -> NDArray[np.int64]:
    """`num_frames` evenly spread indices from `start` to `end - 1`, both included, rounded down exactly."""
    if end - start < num_frames or num_frames < 1:
        raise _too_few(num_frames, end - start)
    steps: NDArray[np.int64] = np.arange(num_frames, dtype=np.int64)
    return start + steps * (end - 1 - start) // max(num_frames - 1, 1)


def resample_window(window: Window, fps: float, target_fps: float) -> NDArray[np.int64]:
    """All indices of a window when played at `target_fps`: steps of `fps / target_fps`, each rounded down."""
    step = 1.0 if abs(fps - target_fps) < SAME_RATE_FPS else fps / target_fps
    found: NDArray[np.int64] = np.trunc(np.arange(window.start, window.end, step)).astype(np.int64)
    # A sum of fractional steps can come out a hair too long.
    return found.clip(max=window.end - 1)


def speed_up(indices: NDArray[np.int64], factor: float, num_frames: int) -> NDArray[np.int64]:
    """Thin a list by `factor`, or by less if fewer than `num_frames` would be left."""
    factor = min(factor, len(indices) / num_frames)
    if factor <= 1:
        return indices
    # The quotient of a quotient can come out a hair below `num_frames`.
    num_left = max(num_frames, int(len(indices) / factor))
    return indices[np.linspace(0, len(indices) - 1, num_left).astype(np.int64)]


def sample_rate(fps: NDArray[np.float64], fps_max: float | None) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(frame rate after thinning, every how many frames one is taken); an image (NaN) has rate 0 and interval 1."""
    image = np.isnan(fps)
    known = np.where(image, 0.0, fps)
    if fps_max is None:
        return known, np.ones(len(fps), dtype=np.int64)
    fast = known >= fps_max
    interval = np.where(fast, np.ceil(known / fps_max), 1).astype(np.int64)
    return np.where(fast, np.floor(known / interval), known), interval


def _cut(indices: NDArray[np.int64], num_frames: int, start: int) -> NDArray[np.int64]:
    if len(indices) < num_frames or num_frames < 1:
        raise _too_few(num_frames, len(indices))
    return indices[start : start + num_frames]


def _too_few(wanted: int, found: int) -> DataError:
    return DataError(f"{wanted} frames wanted, the clip has {found} to choose from; check the manifest")
