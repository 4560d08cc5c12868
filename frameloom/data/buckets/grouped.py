"""Open-Sora-Plan's buckets: one size for all, or each clip's own size up to an area; lengths follow the clips."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frameloom.config.schema.buckets import GroupedSection
from frameloom.core.errors import ConfigError
from frameloom.core.resolutions import ratio_name
from frameloom.data.buckets.policy import UNUSED, Bucket, BucketPolicy, Clips, Draw, Ints
from frameloom.data.media.frames import SAME_RATE_FPS, FrameRule
from frameloom.models.vaes.config import LengthRule

PUBLISHED_MIN_FRAMES = 29
PUBLISHED_GROUP_BATCHES = 4
TOO_SMALL, WRONG_RATIO, TOO_LONG, TOO_SHORT = range(1, 5)

Codes = NDArray[np.int8]
Flags = NDArray[np.bool_]


class Grouped(BucketPolicy):
    """`rule` gives the legal lengths; the sizes are multiples of `settings.hw_stride`."""

    reasons = ("too small", "wrong ratio", "too long", "too short")

    def __init__(self, settings: GroupedSection, *, rule: LengthRule) -> None:
        self.settings = settings
        self.rule = rule
        self.frame_rule = FrameRule(
            fps=settings.train_fps, speed=settings.speed_factor, skip_last_start=settings.as_published
        )
        self.min_frames = settings.min_frames or (PUBLISHED_MIN_FRAMES if settings.as_published else 1)
        published_group = PUBLISHED_GROUP_BATCHES * settings.batch if settings.as_published else 0
        self.min_group = published_group if settings.min_group is None else settings.min_group
        drops_some = 0 < settings.drop_short_ratio < 1
        self.dropped_by_chance = "rare shape or dropped as short" if drops_some else "rare shape"
        lengths = np.array(rule.legal(settings.num_frames, settings.sp_size), dtype=np.int64)
        self._lengths = np.unique([1, *lengths[lengths >= self.min_frames].tolist()])
        self.min_area = settings.max_hxw // 4 if settings.min_hxw is None else settings.min_hxw
        self._sizes = self._list_sizes()
        # Position of a size by [height, width] in strides (force_resolution has only one size and needs none).
        step = settings.hw_stride
        top = max(max(size) for size in self._sizes) // step
        self._size_index = np.full((top + 1, top + 1), UNUSED, dtype=np.int32)
        for i, (height, width) in enumerate(self._sizes):
            self._size_index[height // step, width // step] = i
        self.buckets = tuple(
            Bucket(i * len(self._lengths) + k, f"{height}x{width}", frames, ratio_name(height, width), height, width,
                   settings.batch)
            for i, (height, width) in enumerate(self._sizes)
            for k, frames in enumerate(self._lengths.tolist())
        )  # fmt: skip

    def _list_sizes(self) -> list[tuple[int, int]]:
        """Every size that a clip can get."""
        settings = self.settings
        if settings.force_resolution:
            return [(settings.max_height, settings.max_width)]
        low, high = settings.ratio_limits
        step = settings.hw_stride
        side = range(step, int(math.sqrt(settings.max_hxw * max(high, 1 / low))) + 1, step)
        sizes = [
            (height, width)
            for height in side
            for width in side
            if self.min_area <= height * width <= settings.max_hxw and low <= height / width <= high
        ]
        if not sizes:
            raise ConfigError(
                f"data.grouped: no size has sides that are multiples of hw_stride {step}, an area from {self.min_area} "
                f"to max_hxw {settings.max_hxw} and height / width from {low:g} to {high:g}; widen one of them"
            )
        return sizes

    def geometry(self) -> dict[str, Any]:
        rule = self.frame_rule
        spacing = {"fps": rule.fps, "speed": rule.speed, "skip_last_start": rule.skip_last_start}
        return {"policy": "grouped", **spacing, "buckets": self.shapes}

    def fit_sizes(self, clips: Clips) -> tuple[Ints, Ints, Codes]:
        """(height, width, reason) of each clip: scaled down to the area, never up, and cut to the stride.

        Both sides are 0 where `reason` is not; the ratio is that of the result.
        """
        settings = self.settings
        low, high = settings.ratio_limits
        if settings.force_resolution:
            forced = settings.max_height / settings.max_width
            inside = (clips.ratio >= low * forced) & (clips.ratio <= high * forced)
            height, width = (np.where(inside, side, 0) for side in (settings.max_height, settings.max_width))
            return height, width, np.where(inside, 0, WRONG_RATIO).astype(np.int8)
        height, width = self.cut_sides(*self.shrink(clips.height, clips.width))
        small = (height == 0) | (width == 0) | (height * width < self.min_area)
        ratio = height / np.maximum(width, 1)
        reason = np.where(small, TOO_SMALL, np.where((ratio < low) | (ratio > high), WRONG_RATIO, 0))
        return np.where(reason > 0, 0, height), np.where(reason > 0, 0, width), reason.astype(np.int8)

    def shrink(self, height: Ints, width: Ints) -> tuple[Ints, Ints]:
        """The size of a frame before it is cut: at most `max_hxw` pixels."""
        scale = np.sqrt(np.minimum(self.settings.max_hxw / (height * width), 1.0))
        return (height * scale).astype(np.int64), (width * scale).astype(np.int64)

    def cut_sides(self, height: Ints, width: Ints) -> tuple[Ints, Ints]:
        step = self.settings.hw_stride
        return height // step * step, width // step * step

    def fit_lengths(self, clips: Clips) -> tuple[Ints, Flags, Codes]:
        """(frames, whether there are fewer than wanted, reason): the longest legal length of each clip at `train_fps`.

        Images have one frame; there are 0 where `reason` is not.
        """
        settings = self.settings
        fps = np.where(clips.is_image, settings.train_fps, clips.fps)
        step = np.where(np.abs(fps - settings.train_fps) < SAME_RATE_FPS, 1.0, fps / settings.train_fps)
        found = np.ceil(clips.frames / step).astype(np.int64)
        limit = settings.too_long_factor * settings.num_frames * (fps / settings.train_fps) * settings.speed_factor
        frames = self.valid_lengths(np.minimum(found, settings.num_frames))
        is_short = ~clips.is_image & (found < settings.num_frames)
        reason = np.where(frames == 0, TOO_SHORT, 0)
        if settings.drop_short_ratio == 1:
            reason = np.where(is_short, TOO_SHORT, reason)
        if settings.num_frames > 1 or settings.as_published:  # a single frame can come from any video
            reason = np.where(clips.frames > limit, TOO_LONG, reason)
        reason = np.where(clips.is_image, 0, reason)
        frames = np.where(clips.is_image, 1, np.where(reason > 0, 0, frames))
        return frames, is_short, reason.astype(np.int8)

    def valid_lengths(self, frames: Ints) -> Ints:
        """The longest legal length within `frames`; 0 where it would be below the least."""
        trimmed = self.rule.trim(frames, self.settings.sp_size)
        return np.where(trimmed >= self.min_frames, trimmed, 0)

    def assign_clips(self, clips: Clips, rows: Ints, draw: Draw) -> NDArray[np.int32]:
        chosen, is_short = self._find_buckets(clips)
        if 0 < self.settings.drop_short_ratio < 1:
            short = np.flatnonzero(is_short)
            dropped = draw(rows[short], np.zeros_like(short)) < self.settings.drop_short_ratio
            chosen[short[dropped]] = UNUSED
        return chosen

    def _find_buckets(self, clips: Clips) -> tuple[NDArray[np.int32], Flags]:
        """(bucket of each clip, whether it has a size but fewer frames than wanted)."""
        height, width, size_reason = self.fit_sizes(clips)
        frames, is_short, length_reason = self.fit_lengths(clips)
        step = self.settings.hw_stride
        size = 0 if self.settings.force_resolution else self._size_index[height // step, width // step]
        index = size * len(self._lengths) + np.searchsorted(self._lengths, frames)
        chosen = np.where((size_reason == 0) & (length_reason == 0), index, UNUSED).astype(np.int32)
        return chosen, (size_reason == 0) & is_short

    def possible_clips(self, clips: Clips) -> list[tuple[Ints, NDArray[np.int32]]]:
        chosen, _ = self._find_buckets(clips)
        where = np.flatnonzero(chosen != UNUSED)
        return [(where, chosen[where])]

    def keep_buckets(self, counts: Ints) -> Flags:
        return counts >= self.min_group

    def reject_reason(self, clips: Clips) -> Codes:
        size, length = self.fit_sizes(clips)[2], self.fit_lengths(clips)[2]
        return np.where(size > 0, size, length).astype(np.int8)
