"""One size and one length for all videos, and, if wanted, the same size for images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from frameloom.config.bucket_policies import FixedSection
from frameloom.data.buckets import UNUSED, Bucket, Clips, Draw
from frameloom.data.policies.ratios import ratio_name
from frameloom.data.policies.thinned import ThinnedPolicy


class Fixed(ThinnedPolicy):
    """Bucket 0 holds the videos, bucket 1 the images where they are asked for."""

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

    def assign_clips(self, clips: Clips, rows: NDArray[np.int64], draw: Draw) -> NDArray[np.int32]:
        bucket = np.where(clips.is_image & (self.settings.frames > 1), 1, 0)
        return np.where(self.why_unused(clips) == 0, bucket, UNUSED).astype(np.int32)

    def why_unused(self, clips: Clips) -> NDArray[np.int8]:
        frames, takes_images = self.settings.frames, self.settings.image_batch is not None
        short = ~clips.is_image & (self.count_frames(clips) < frames)
        image = clips.is_image & (frames > 1) & (not takes_images)
        return np.where(short, 1, np.where(image, 2, 0)).astype(np.int8)
