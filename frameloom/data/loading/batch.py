"""A micro-batch and the request for one.

Shape letters: B batch, C channels, F frames, H height, W width, N images beside a clip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.process_pool import NO_NOTE
from frameloom.core.random import key, uniform_at
from frameloom.data.buckets.policy import Bucket


@dataclass(frozen=True)
class BatchRequest:
    """One micro-batch of a plan; `bucket` is an index into the policy's buckets.

    `fallback_rows` [B, n] are tried in place of a row that cannot be read; without them such a sample is left out.
    """

    epoch: int
    index: int
    bucket: int
    rows: NDArray[np.int64]
    sample_indices: NDArray[np.int64]
    fallback_rows: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class BadClip:
    """A file that could not be read, and the sample index (`ordinal`, its name on disk) that it should have filled;
    `fatal` if it ended or stalled its worker."""

    row: int
    path: str
    reason: str
    epoch: int
    ordinal: int
    fatal: bool = False


@dataclass
class Crops:
    """Where each sample was cut, (height, width) or (top, left) in pixels: what SDXL is conditioned on.

    `original_B2` is the size of the source as displayed; `top_left_B2` is in the scaled picture, after mirroring.
    """

    original_B2: Tensor
    top_left_B2: Tensor
    target_B2: Tensor


@dataclass
class JointImages:
    """Images that are trained on beside clips: N for each, of the same size, each with its own caption."""

    pixels_BCNHW: Tensor
    rows_BN: NDArray[np.int64]
    captions: list[list[str]]
    text: dict[str, Tensor] | None = None
    """of all captions in order, so the first dimension is B * N"""


@dataclass
class Batch:
    """One micro-batch, all of one shape.

    `rows` are the manifest rows that were read (a bad clip is replaced). `sample_indices` count the
    samples of their epoch: every later draw for a sample is keyed by (seed, purpose, epoch, sample index). `latents`
    are mean and standard deviation, unscaled, from a cache.
    """

    epoch: int
    index: int
    bucket: Bucket
    rows: NDArray[np.int64]
    sample_indices: NDArray[np.int64]
    captions: list[str]
    pixels_BCFHW: Tensor | None = None
    latents: tuple[Tensor, Tensor] | None = None
    text: dict[str, Tensor] | None = None
    crops: Crops | None = None
    images: JointImages | None = None
    control_BCFHW: Tensor | None = None
    """control clips, cut as the clips are"""
    bad: list[BadClip] = field(default_factory=list)
    is_filler: bool = False
    """run so that all processes compute alike, and counted as nothing"""
    part: int = 0
    """where a piece of a micro-batch begins in it"""

    @property
    def size(self) -> int:
        return len(self.rows)


NO_ROW = NO_NOTE
OnOpen = Callable[[int], None]
"""Called with the row that is about to be opened, or NO_ROW when none is, so that a hang or crash of a decoder can be
traced to a file. It may raise ClipError to keep a row from being opened."""


def ignore_open(row: int) -> None:
    """The default: rows are not reported."""


def draw_at(seed: int, purpose: str, epoch: int, sample_index: int, number: int = 0) -> float:
    """One uniform number in [0, 1) for one sample."""
    return float(uniform_at(key(seed, purpose, epoch, sample_index), np.array([number]))[0])
