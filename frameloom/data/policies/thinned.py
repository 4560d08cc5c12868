"""What policies share that thin fast clips to a highest frame rate."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from frameloom.data.buckets import BucketPolicy, Clips
from frameloom.data.policies.lengths import sample_rate


class ThinnedPolicy(BucketPolicy):
    """Takes every n-th frame, so that no clip has more than `fps_max` frames per second (None: any rate)."""

    disk_name: ClassVar[str]
    """of the policy in the fingerprint of a cache, whatever the class is called"""
    fps_max: float | None

    def intervals(self, fps: NDArray[np.float64]) -> NDArray[np.int64]:
        return sample_rate(fps, self.fps_max)[1]

    def count_frames(self, clips: Clips) -> NDArray[np.int64]:
        """Frames of each clip after thinning."""
        return clips.frames // self.intervals(clips.fps)

    def geometry(self) -> dict[str, Any]:
        return {"policy": self.disk_name, "fps_max": self.fps_max, "buckets": self.shapes}
