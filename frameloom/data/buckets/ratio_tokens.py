"""CogVideoX-Fun's buckets: a table of aspect ratios, sizes around a side, and lengths under a number of tokens.

The original draws a size for each batch and cuts all its clips to the shortest; here every clip has its own draw and
its own length, and batches are made of clips that agree. So a batch of one is the same as the original's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from frameloom.config.schema.buckets import RatioTokensSection
from frameloom.core.errors import ConfigError
from frameloom.data.buckets.policy import (
    UNUSED,
    Bucket,
    BucketPolicy,
    Clips,
    Draw,
    Ints,
    draw_weighted,
    nearest_values,
)
from frameloom.data.media.frames import FrameRule
from frameloom.models.vaes.config import LengthRule

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

SIZE_STEP = 128
# A video may be scaled up to sizes below this many times its mean side.
MAX_ENLARGEMENT = 1.25
FIRST_SHARE = 0.75  # of clips that keep the full size with random_hw_adapt
WHOLE_SHARE = 0.9  # of clips that keep all frames with random_frame_crop
SMALLEST_TOKEN_SIDE = 256
# By the largest side: by what it may be divided.
_DIVISORS = ((1536, (1, 1.25, 1.5, 2, 2.5, 3)), (1024, (1, 1.25, 1.5, 2)), (768, (1, 1.25, 1.5)), (512, (1,)))

# The draws of a row.
DRAW_SIZE, DRAW_RATIO, DRAW_LENGTH, DRAW_TOKENS = range(4)


def list_divisors(side: int, extra: float | None = None) -> list[float]:
    """By what `random_hw_adapt` divides a side; sides below 512 stay as they are."""
    for limit, divisors in _DIVISORS:
        if side >= limit:
            return [*map(float, divisors), *([] if extra is None else [extra])]
    return [1.0]


def first_heavy(count: int, share: float) -> list[float]:
    """Weights of `count` choices, the first with `share` and the others alike."""
    return [1.0] if count == 1 else [share] + [(1 - share) / (count - 1)] * (count - 1)


class RatioTokens(BucketPolicy):
    """`stride` is pixels per token on a side; sizes are cut to multiples of it."""

    reasons = ("too short",)

    def __init__(self, settings: RatioTokensSection, *, stride: int, rule: LengthRule) -> None:
        self.settings = settings
        self.stride = stride
        self.rule = rule
        self.frame_rule = FrameRule(stride=settings.video_sample_stride)
        switches = ("random_hw_adapt", "random_frame_crop", "random_ratio_crop", "keep_all_node_same_token_length")
        self.random_keys = [f"data.ratio_tokens.{name}" for name in switches if getattr(settings, name)]
        self.video_sides = self._list_video_sides()
        image, extra = settings.image_sample_size, settings.image_sample_size / settings.video_sample_size
        divisors = list_divisors(image, extra) if settings.random_hw_adapt else [1.0]
        self.image_sides = [image / divisor for divisor in divisors]
        self._sides = np.unique([*self.video_sides, *self.image_sides])
        self._ratios = list(CROP_WEIGHTS if settings.random_ratio_crop else RATIO_TABLE)
        self._lengths = np.array(rule.legal(settings.video_sample_n_frames), dtype=np.int64)
        self._index, self.buckets = self._build_buckets()

    @property
    def pixel_budget(self) -> int:
        """The most pixels of a clip over all its frames."""
        return self.settings.video_sample_n_frames * self.settings.token_sample_size**2

    def _list_video_sides(self) -> list[float]:
        """Sides that a video may be drawn to; rising in the mode with token lengths, where all are as likely."""
        settings = self.settings
        video, image = settings.video_sample_size, settings.image_sample_size
        if not settings.random_hw_adapt:
            return [float(video)]
        if not settings.training_with_video_token_length:
            return [video / divisor for divisor in list_divisors(video)]
        if image <= video:
            return [float(image if settings.as_published else video)]
        return [*map(float, range(video, image, SIZE_STEP)), float(image)]

    def longest_frames(self, sides: NDArray[np.float64]) -> Ints:
        """The most frames of a video at these sides."""
        limit = self.settings.video_sample_n_frames
        if not self.settings.training_with_video_token_length:
            return np.full(len(sides), limit, dtype=np.int64)
        fitting = np.minimum(self.pixel_budget / sides**2, limit)
        if self.settings.as_published:
            # The first frame is counted twice: 13 frames where 9 fit.
            return (np.floor(fitting / self.rule.stride) * self.rule.stride + 1).astype(np.int64)
        return np.maximum(self.rule.trim(np.floor(fitting).astype(np.int64)), 1)

    def fill_batch(self, frames: int, height: int, width: int) -> int:
        """Clips per batch; short and small ones come 2 or 4 times as many. (The original repeats the same clips.)"""
        pixels, size = frames * height * width, self.settings.train_batch_size
        if not self.settings.training_with_video_token_length:
            return size
        return size * (4 if self.pixel_budget // 16 >= pixels else 2 if self.pixel_budget // 4 >= pixels else 1)

    def _build_buckets(self) -> tuple[NDArray[np.int32], tuple[Bucket, ...]]:
        """(bucket by [side, ratio, length], the buckets); equal shapes share one, whatever ratio led to them."""
        index = np.full((len(self._sides), len(self._ratios), len(self._lengths)), UNUSED, dtype=np.int32)
        found: dict[tuple[int, int, int], Bucket] = {}
        longest = np.where(np.isin(self._sides, self.video_sides), self.longest_frames(self._sides), 1)
        for i, side in enumerate(self._sides.tolist()):
            for j, ratio in enumerate(self._ratios):
                table = (pixels / TABLE_SIDE * side / self.stride for pixels in RATIO_TABLE[ratio])
                height, width = (int(cells) * self.stride for cells in table)
                if not (height and width):
                    raise ConfigError(
                        f"data.ratio_tokens: at a side of {side:g} the ratio {ratio} has no room for a token of "
                        f"{self.stride} pixels; use sizes of {2 * self.stride} or more"
                    )
                for k, frames in enumerate(self._lengths[self._lengths <= longest[i]].tolist()):
                    batch = self.fill_batch(frames, height, width)
                    made = Bucket(len(found), f"{side:.4g}px", frames, f"{ratio:g}", height, width, batch)
                    index[i, j, k] = found.setdefault((frames, height, width), made).index
        return index, tuple(found.values())

    def geometry(self) -> dict[str, Any]:
        return {"policy": "ratio_tokens", "frame_stride": self.frame_rule.stride, "buckets": self.shapes}

    def available_frames(self, frames: Ints) -> Ints:
        """How many frames of a file the stride leaves. The original does not count the one behind the last stride."""
        stride = self.settings.video_sample_stride
        count = frames // stride if self.settings.as_published else (frames - 1) // stride + 1
        return np.minimum(count, self.settings.video_sample_n_frames)

    def assign_clips(self, clips: Clips, rows: Ints, draw: Draw) -> NDArray[np.int32]:
        settings, is_video = self.settings, ~clips.is_image
        sides = np.empty(len(rows), dtype=np.float64)
        for where, choices in ((~is_video, self.image_sides), (is_video, self.video_sides)):
            if len(choices) == 1:
                sides[where] = choices[0]
                continue
            draws = draw(rows[where], np.full(int(where.sum()), DRAW_SIZE, dtype=np.int64))
            if choices is self.video_sides and settings.training_with_video_token_length:
                count = self.count_sides((clips.height[where] + clips.width[where]) / 2)
                sides[where] = np.array(choices)[(draws * count).astype(np.int64)]
            else:
                sides[where] = np.array(choices)[draw_weighted(first_heavy(len(choices), FIRST_SHARE), draws)]
        if settings.random_ratio_crop:
            ratios = draw_weighted(list(CROP_WEIGHTS.values()), draw(rows, np.full_like(rows, DRAW_RATIO)))
        else:
            ratios = nearest_values(self._ratios, clips.ratio)
        side_index = np.searchsorted(self._sides, sides)
        frames, videos = np.ones(len(rows), dtype=np.int64), np.flatnonzero(is_video)
        first = self._index[side_index[videos], ratios[videos], 0]
        frames[videos] = self._cut_lengths(clips.frames[videos], sides[videos], first, rows[videos], draw)
        lengths = np.searchsorted(self._lengths, np.maximum(frames, 1))
        return np.where(frames > 0, self._index[side_index, ratios, lengths], UNUSED).astype(np.int32)

    def count_sides(self, mean_side: NDArray[np.float64]) -> Ints:
        """How many of the rising `video_sides` a video of this mean side may have; a tiny one has the smallest."""
        count = np.searchsorted(self.video_sides, MAX_ENLARGEMENT * mean_side, side="left")
        fallback = len(self.video_sides) if self.settings.as_published else 1
        return np.where(count == 0, fallback, count).astype(np.int64)

    def _cut_lengths(self, found: Ints, sides: NDArray[np.float64], first: Ints, rows: Ints, draw: Draw) -> Ints:
        """Frames of videos with `found` frames; `first` is the bucket of each with the shortest length."""
        frames = np.minimum(self.available_frames(found), self.longest_frames(sides))
        candidates, weights = self.list_crops()
        if self.settings.random_frame_crop and candidates:
            draws = draw(rows, np.full(len(rows), DRAW_LENGTH, dtype=np.int64))
            frames = np.minimum(frames, np.array(candidates)[draw_weighted(weights, draws)])
        if self.settings.keep_all_node_same_token_length:
            draws = draw(rows, np.full(len(rows), DRAW_TOKENS, dtype=np.int64))
            area = self.costs[first] / self._lengths[0]
            frames = np.minimum(frames, self.frames_of_tokens(self.draw_token_sides(draws), area))
        return self.rule.trim(frames)

    def list_crops(self) -> tuple[list[int], list[float]]:
        """Lengths that `random_frame_crop` draws from, with their weights; none when there is nothing to cut."""
        step = self.rule.stride
        lengths = list(range(1 + step, self.settings.video_sample_n_frames + step, step))
        return lengths, list(reversed(first_heavy(len(lengths), WHOLE_SHARE))) if lengths else []

    def list_token_sides(self) -> list[int]:
        """Sides of the square whose tokens `keep_all_node_same_token_length` draws."""
        top = self.settings.token_sample_size
        return [*range(SMALLEST_TOKEN_SIDE, top, SIZE_STEP), top]

    def draw_token_sides(self, draws: NDArray[np.float64]) -> Ints:
        sides = np.array(self.list_token_sides(), dtype=np.int64)
        return sides[(draws * len(sides)).astype(np.int64)]

    def frames_of_tokens(self, token_sides: Ints, area: NDArray[np.float64]) -> Ints:
        """The most frames of an area that hold no more tokens than the square of a side over the full length."""
        limit = self.settings.video_sample_n_frames
        fitting = np.minimum(token_sides**2 * limit / area, limit)
        return np.maximum(self.rule.trim(np.floor(fitting).astype(np.int64)), 1)

    def reject_reason(self, clips: Clips) -> NDArray[np.int8]:
        return (~clips.is_image & (self.available_frames(clips.frames) < 1)).astype(np.int8)
