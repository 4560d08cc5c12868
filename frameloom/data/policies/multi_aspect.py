"""SDXL's list of sizes. Each clip goes to the size nearest in shape; of equal shapes, to the largest it can fill.

The original draws one size for each batch and crops every image to it, however tall or wide the image is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from frameloom.config.bucket_policies import MultiAspectSection
from frameloom.data.buckets import UNUSED, Bucket, Clips, Draw
from frameloom.data.policies.ratios import draw_weighted, nearest_values, ratio_name
from frameloom.data.policies.thinned import ThinnedPolicy


class MultiAspect(ThinnedPolicy):
    """Buckets are the different sizes in the order of the list."""

    disk_name = "MultiAspect"
    reasons = ("too short",)

    def __init__(self, settings: MultiAspectSection, *, fps_max: float | None) -> None:
        self.settings = settings
        self.fps_max = fps_max
        self.sizes = list(dict.fromkeys(settings.sizes))
        self.weights = [settings.sizes.count(size) for size in self.sizes]
        self.buckets = tuple(
            Bucket(i, f"{height}x{width}", settings.frames, ratio_name(height, width), height, width, settings.batch)
            for i, (height, width) in enumerate(self.sizes)
        )
        # Shapes, and for each of them its sizes from small to large.
        self._ratios = list(dict.fromkeys(height / width for height, width in self.sizes))
        self._steps = [self._sizes_of(ratio) for ratio in self._ratios]

    def _sizes_of(self, ratio: float) -> NDArray[np.int64]:
        found = [i for i, (height, width) in enumerate(self.sizes) if height / width == ratio]
        return np.array(sorted(found, key=lambda i: self.sizes[i]), dtype=np.int64)

    def assign_clips(self, clips: Clips, rows: NDArray[np.int64], draw: Draw) -> NDArray[np.int32]:
        fits = np.flatnonzero(self.why_unused(clips) == 0)
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

    def why_unused(self, clips: Clips) -> NDArray[np.int8]:
        return (self.count_frames(clips) < self.settings.frames).astype(np.int8)

    def random_keys(self) -> list[str]:
        return ["data.multi_aspect.as_published"] if self.settings.as_published else []
