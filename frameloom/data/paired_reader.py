"""Batches in which every sample is followed by one of another group of rows, as DreamBooth keeps the prior of a class.

The first half of a batch is what the plan asked for, and its `rows` are only these; the second half is drawn, one row
for each slot of the first.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

from frameloom.data.batch import Batch, BatchRequest, Crops, Watch, no_watch
from frameloom.data.reader import ClipReader
from frameloom.data.slots import draw_at

# Slots of the second half, beyond all that an epoch can have.
PAIR_SLOT = 1 << 40
_NUM_SPARES = 4


class PairedReader:
    """`rows` are those that the second half is drawn from."""

    def __init__(self, reader: ClipReader, rows: NDArray[np.int64], *, seed: int) -> None:
        self._reader, self._rows, self._seed = reader, rows, seed

    def name(self, row: int) -> str:
        return self._reader.name(row)

    def read(self, request: BatchRequest, watch: Watch = no_watch) -> Batch:
        first = self._reader.read(request, watch)
        drawn = np.array([self._draw(request.epoch, int(ordinal)) for ordinal in first.ordinals], dtype=np.int64)
        drawn = drawn.reshape(len(first.ordinals), 1 + _NUM_SPARES)
        second = self._reader.read(
            replace(request, rows=drawn[:, 0], ordinals=first.ordinals + PAIR_SLOT, spares=drawn[:, 1:]), watch
        )
        return join_batches(first, second)

    def _draw(self, epoch: int, ordinal: int) -> list[int]:
        """A row and spares for it, in case it cannot be read."""
        draws = [draw_at(self._seed, "pair", epoch, ordinal, number) for number in range(1 + _NUM_SPARES)]
        return [int(self._rows[int(draw * len(self._rows))]) for draw in draws]


def join_batches(first: Batch, second: Batch) -> Batch:
    """Two batches of pixels and one bucket as one that counts for as many samples as the first."""
    assert first.pixels_BCFHW is not None and second.pixels_BCFHW is not None
    assert first.crops is not None and second.crops is not None
    pairs = {part.name: (getattr(first.crops, part.name), getattr(second.crops, part.name)) for part in fields(Crops)}
    return replace(
        first,
        ordinals=np.concatenate([first.ordinals, second.ordinals]),
        captions=[*first.captions, *second.captions],
        pixels_BCFHW=torch.cat([first.pixels_BCFHW, second.pixels_BCFHW]),
        crops=Crops(**{name: torch.cat(pair) for name, pair in pairs.items()}),
        bad=[*first.bad, *second.bad],
    )
