"""The slots of a micro-batch, filled one by one; a clip that cannot be read is replaced deterministically."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from frameloom.core.errors import DataError
from frameloom.core.random import key, uniform_at
from frameloom.data.batch import BadClip, BatchRequest
from frameloom.data.buckets import BucketPolicy, assign
from frameloom.data.decode import ClipError, FatalClip
from frameloom.data.manifest import Manifest

Found = TypeVar("Found")


def draw_at(seed: int, purpose: str, epoch: int, ordinal: int, number: int = 0) -> float:
    """One uniform number in [0, 1) for one sample."""
    return float(uniform_at(key(seed, purpose, epoch, ordinal), np.array([number]))[0])


def note_bad(manifest: Manifest, row: int, error: ClipError, epoch: int, ordinal: int) -> BadClip:
    return BadClip(row, manifest.clip(row).path, str(error), epoch, ordinal, isinstance(error, FatalClip))


class Slots:
    """Fills the slots of a request one by one, trying other rows of the same bucket where a clip is bad."""

    def __init__(self, manifest: Manifest, grid: BucketPolicy, seed: int, max_replacements: int) -> None:
        self._manifest = manifest
        self._grid = grid
        self._seed = seed
        self._max_replacements = max_replacements
        # Only looked up after the first bad clip of an epoch, so it is not worth sending to workers.
        self._assignment: tuple[int, NDArray[np.int32]] | None = None

    def fill(
        self, request: BatchRequest, read_row: Callable[[int, int], Found]
    ) -> tuple[list[int], list[int], list[Found], list[BadClip]]:
        """(rows read, their ordinals, what `read_row(row, ordinal)` gave, the bad ones).

        With `max_replacements` 0 a bad clip leaves no sample behind; else not finding a good one is an error.
        """
        rows: list[int] = []
        ordinals: list[int] = []
        samples: list[Found] = []
        bad: list[BadClip] = []
        for row, ordinal in zip(request.rows.tolist(), request.ordinals.tolist(), strict=True):
            failed: list[BadClip] = []
            for candidate in self._candidates(request, row, ordinal):
                try:
                    samples.append(read_row(candidate, ordinal))
                except ClipError as error:
                    failed.append(note_bad(self._manifest, candidate, error, request.epoch, ordinal))
                    continue
                rows.append(candidate)
                ordinals.append(ordinal)
                break
            else:
                self._give_up(request, failed)
            bad += failed
        return rows, ordinals, samples, bad

    def _give_up(self, request: BatchRequest, failed: list[BadClip]) -> None:
        if self._max_replacements:
            reasons = "\n".join(f"  row {clip.row}: {clip.reason}" for clip in failed)
            raise DataError(
                f"micro-batch {request.index} of epoch {request.epoch}, bucket "
                f"{self._grid.buckets[request.bucket].name}: none of {len(failed)} clips could be read; "
                f"repair the files or take them out of the manifest\n{reasons}"
            )

    def _candidates(self, request: BatchRequest, row: int, ordinal: int) -> Iterator[int]:
        yield row
        if not self._max_replacements:
            return
        tried = [row]
        others = self._rows_of(request.epoch, request.bucket)
        for attempt in range(self._max_replacements):
            left = others[~np.isin(others, tried)]
            if not len(left):
                return
            draw = draw_at(self._seed, "replacement", request.epoch, ordinal, attempt)
            tried.append(int(left[int(draw * len(left))]))
            yield tried[-1]

    def _rows_of(self, epoch: int, bucket: int) -> NDArray[np.int64]:
        if self._assignment is None or self._assignment[0] != epoch:
            self._assignment = (epoch, assign(self._manifest, self._grid, self._seed, epoch))
        return np.flatnonzero(self._assignment[1] == bucket)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_assignment": None}
