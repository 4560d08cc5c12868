"""What the loader hands to a trainer, and what it asks a reader for.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from frameloom.data.grid import Bucket


@dataclass(frozen=True)
class BatchRequest:
    """One micro-batch of a plan; `bucket` is an index into the grid."""

    epoch: int
    index: int
    bucket: int
    rows: NDArray[np.int64]
    ordinals: NDArray[np.int64]


@dataclass(frozen=True)
class BadClip:
    """A file that could not be read, and the slot it should have filled."""

    row: int
    path: str
    reason: str
    epoch: int
    ordinal: int


@dataclass
class Batch:
    """One micro-batch, all of one shape.

    `rows` are the manifest rows that were really read (a bad clip is replaced); `ordinals` are the random slots of the
    samples in their epoch: every later draw for a sample is keyed by (seed, purpose, epoch, ordinal). `latents` are
    mean and standard deviation, unscaled, from a cache.
    """

    epoch: int
    index: int
    bucket: Bucket
    rows: NDArray[np.int64]
    ordinals: NDArray[np.int64]
    captions: list[str]
    pixels_BCFHW: Tensor | None = None
    latents: tuple[Tensor, Tensor] | None = None
    text: dict[str, Tensor] | None = None
    bad: list[BadClip] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.rows)


# Told the row that is about to be opened, so that a hanging or crashing decoder can be blamed on a file.
Watch = Callable[[int], None]


def no_watch(row: int) -> None:
    """Nobody watches."""


class BatchReader(Protocol):
    """Reads micro-batches; the result depends on the request alone. Must survive pickling to be used with workers."""

    def read(self, request: BatchRequest, watch: Watch = no_watch) -> Batch: ...

    def name(self, row: int) -> str:
        """What to call a row in a message: its path."""
        ...
