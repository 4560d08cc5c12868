"""How often the rows of each source come in an epoch: a function of (seed, epoch) and the sources alone.

Each source has one keyed order of its rows, endlessly repeated; an epoch takes the next stretch of it. So a repeat of
2 shows every row twice, a repeat of 0.5 shows one half and then the other, and over any number of epochs the counts
of two rows of a source differ by one at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from frameloom.core.random import bits_at, key


class Share(NamedTuple):
    """`repeat` is how often each row comes in an epoch; a `weight` is the source's part of an epoch instead.

    A source with a repeat of 0 (and a weight of 0 where others have weights) is there for other uses than epochs.
    """

    num_rows: int
    weight: float | None = None
    repeat: float = 1.0

    @property
    def is_plain(self) -> bool:
        return self.weight is None and self.repeat == 1


def samples_per_source(shares: Sequence[Share]) -> list[int]:
    """Samples of each source in an epoch. Weights divide as many samples as there are rows (repeats counted)."""
    counts = [
        max(1, round(share.num_rows * share.repeat)) if share.num_rows and share.repeat else 0 for share in shares
    ]
    if all(share.weight is None for share in shares):
        return counts
    if any(share.weight is None for share in shares):
        raise ValueError("either all sources have a weight or none")
    total, weights = sum(counts), np.array([share.weight for share in shares], dtype=np.float64)
    exact = weights / weights.sum() * total
    whole = np.floor(exact).astype(np.int64)
    # The largest fractions get what rounding down left over, so that the sum stays.
    for index in np.argsort(whole - exact, kind="stable")[: total - int(whole.sum())]:
        whole[index] += 1
    return [int(count) for count in whole]


def rows_in_epoch(shares: Sequence[Share], seed: int, epoch: int) -> NDArray[np.int64]:
    """The rows of an epoch in rising order, each as often as it is shown."""
    total = sum(share.num_rows for share in shares)
    if all(share.is_plain for share in shares):
        return np.arange(total, dtype=np.int64)
    parts = []
    start = 0
    for index, (share, samples) in enumerate(zip(shares, samples_per_source(shares), strict=True)):
        rows = np.arange(start, start + share.num_rows, dtype=np.int64)
        parts.append(np.repeat(rows, _times(share.num_rows, samples, key(seed, "share", index), epoch)))
        start += share.num_rows
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _times(num_rows: int, samples: int, base: int, epoch: int) -> NDArray[np.int64]:
    """How often each row comes: whole rounds, and once more for those in the stretch that is left."""
    if not num_rows:
        return np.empty(0, dtype=np.int64)
    rounds, rest = divmod(samples, num_rows)
    times = np.full(num_rows, rounds, dtype=np.int64)
    if rest:
        order = np.argsort(bits_at(base, np.arange(num_rows)), kind="stable")
        first = epoch * samples % num_rows
        times[order[np.arange(first, first + rest) % num_rows]] += 1
    return times
