"""One size for all videos, or a list of sizes as SDXL has; fast clips are thinned to a highest frame rate.

Published SDXL training draws one size for each batch and crops every image to it, however tall or wide the image is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from frameloom.config.schema.buckets import FixedSection, MultiAspectSection
from frameloom.core.resolutions import ratio_name
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


class Fixed(BucketPolicy):
    """Bucket 0 holds the videos, bucket 1 the images if `image_batch` is set."""

    disk_name = "Fixed"
    reasons = ("too short", "image")

    def __init__(self, settings: FixedSection, *, fps_max: float | None) -> None:
        self.settings = settings
        self.fps_max = fps_max
        height, width = settings.height, settings.width
        shape = (f"{height}x{width}", ratio_name(height, width), height, width)
        batches = [(settings.frames, settings.batch)]
        if settings.image_batch is not None and settings.frames > 1:
            batches.append((1, settings.image_batch))
        self.buckets = tuple(
            Bucket(i, shape[0], frames, *shape[1:], batch) for i, (frames, batch) in enumerate(batches)
        )

    def assign_clips(self, clips: Clips, rows: Ints, draw: Draw) -> NDArray[np.int32]:
        bucket = np.where(clips.is_image & (self.settings.frames > 1), 1, 0)
        return np.where(self.reject_reason(clips) == 0, bucket, UNUSED).astype(np.int32)

    def reject_reason(self, clips: Clips) -> NDArray[np.int8]:
        frames, takes_images = self.settings.frames, self.settings.image_batch is not None
        short = ~clips.is_image & (self.count_frames(clips) < frames)
        image = clips.is_image & (frames > 1) & (not takes_images)
        return np.where(short, 1, np.where(image, 2, 0)).astype(np.int8)


class MultiAspect(BucketPolicy):
    """Buckets are the different sizes in the order of the list."""

    disk_name = "MultiAspect"
    reasons = ("too short",)

    def __init__(self, settings: MultiAspectSection, *, fps_max: float | None) -> None:
        self.settings = settings
        self.fps_max = fps_max
        self.random_keys = ("data.multi_aspect.as_published",) if settings.as_published else ()
        self.sizes = list(dict.fromkeys(settings.sizes))
        self.weights = [settings.sizes.count(size) for size in self.sizes]
        self.buckets = tuple(
            Bucket(i, f"{height}x{width}", settings.frames, ratio_name(height, width), height, width, settings.batch)
            for i, (height, width) in enumerate(self.sizes)
        )
        # Shapes, and for each of them its sizes from small to large.
        self._ratios = list(dict.fromkeys(height / width for height, width in self.sizes))
        rising = sorted(range(len(self.sizes)), key=lambda i: self.sizes[i])
        self._steps = [
            np.array([i for i in rising if self.sizes[i][0] / self.sizes[i][1] == ratio], dtype=np.int64)
            for ratio in self._ratios
        ]

    def assign_clips(self, clips: Clips, rows: Ints, draw: Draw) -> NDArray[np.int32]:
        fits = np.flatnonzero(self.reject_reason(clips) == 0)
        chosen = np.full(len(rows), UNUSED, dtype=np.int32)
        if self.settings.as_published:
            chosen[fits] = draw_weighted(self.weights, draw(rows[fits], np.zeros_like(fits)))
            return chosen
        # In logarithms, a shape twice as tall is as far away as one twice as wide.
        shapes = nearest_values(np.log(self._ratios).tolist(), np.log(clips.ratio[fits]))
        for shape, steps in enumerate(self._steps):
            where = fits[shapes == shape]
            heights, widths = np.array(self.sizes)[steps].T
            # The scale that covers a size is at most 1 where both sides are as long.
            fillable = (clips.height[where, None] >= heights) & (clips.width[where, None] >= widths)
            chosen[where] = steps[(fillable.sum(axis=1) - 1).clip(0)]
        return chosen

    def reject_reason(self, clips: Clips) -> NDArray[np.int8]:
        return (self.count_frames(clips) < self.settings.frames).astype(np.int8)
