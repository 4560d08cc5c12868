"""Which clip lengths a model takes, and how often a frame is taken from faster clips, for all rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LengthRule:
    """Frames per latent frame, and latent frames per token. A causal autoencoder encodes the first frame alone.

    One frame is always legal: it is an image, and a model whose tokens span several latent frames pads it.
    """

    stride: int = 4
    causal: bool = True
    patch: int = 1

    def latents(self, frames: Ints) -> Ints:
        """Latent frames of clips; 0 for none."""
        whole = (frames - 1) // self.stride + 1 if self.causal else np.maximum(frames // self.stride, frames == 1)
        return np.where(frames < 1, 0, whole).astype(np.int64)

    def frames(self, latents: Ints) -> Ints:
        """The frames that give so many latent frames; 0 for none."""
        return np.where(latents < 1, 0, (latents - self.causal) * self.stride + self.causal).astype(np.int64)

    def trim(self, frames: Ints, multiple: int = 1) -> Ints:
        """The longest legal length within `frames`, with latent frames a multiple of the patch and of `multiple`.

        Where none is left it is 1, or 0 with a `multiple` above 1, which one frame can't be split by.
        """
        latents = self.latents(frames)
        latents -= latents % np.lcm(self.patch, multiple)
        least = np.minimum(frames, 1 if multiple == 1 else 0).clip(0)
        return np.asarray(np.maximum(self.frames(latents), least), dtype=np.int64)

    def legal(self, longest: int, multiple: int = 1) -> Ints:
        """All lengths from 1 to `longest` that `trim` can give, rising."""
        found = np.unique(self.trim(np.arange(1, max(longest, 0) + 1, dtype=np.int64), multiple))
        return found[found > 0]

    def tokens(self, frames: Ints) -> Ints:
        """Tokens in time: latent frames over the patch, rounded up."""
        return np.asarray(-(-self.latents(frames) // self.patch), dtype=np.int64)


def sample_rate(fps: NDArray[np.float64], fps_max: float | None) -> tuple[NDArray[np.float64], Ints]:
    """(frame rate after thinning, every how many frames one is taken); an image (NaN) has rate 0 and interval 1."""
    image = np.isnan(fps)
    known = np.where(image, 0.0, fps)
    if fps_max is None:
        return known, np.ones(len(fps), dtype=np.int64)
    fast = known >= fps_max
    interval = np.where(fast, np.ceil(known / fps_max), 1).astype(np.int64)
    return np.where(fast, np.floor(known / interval), known), interval
