"""The slots of a micro-batch, filled one by one; a clip that cannot be read is replaced deterministically."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from frameloom.core.errors import DataError
from frameloom.core.random import key, uniform_at
from frameloom.data.batch import BadClip, BatchRequest
from frameloom.data.buckets import BucketPolicy
from frameloom.data.decode import ClipError, FatalClip
from frameloom.data.manifest import Manifest

Found = TypeVar("Found")


def draw_at(seed: int, purpose: str, epoch: int, ordinal: int, number: int = 0) -> float:
    """One uniform number in [0, 1) for one sample."""
    return float(uniform_at(key(seed, purpose, epoch, ordinal), np.array([number]))[0])


def note_bad(manifest: Manifest, row: int, error: ClipError, epoch: int, ordinal: int) -> BadClip:
    return BadClip(row, manifest.clip(row).path, str(error), epoch, ordinal, isinstance(error, FatalClip))


class Slots:
    """Fills the slots of a request one by one, trying its spare rows where a clip is bad."""

    def __init__(self, manifest: Manifest, policy: BucketPolicy) -> None:
        self._manifest = manifest
        self._policy = policy

    def fill(
        self, request: BatchRequest, read_row: Callable[[int, int], Found]
    ) -> tuple[list[int], list[int], list[Found], list[BadClip]]:
        """(rows read, their ordinals, what `read_row(row, ordinal)` gave, the bad ones).

        Without spares a bad clip leaves no sample behind; else not finding a good one is an error.
        """
        rows: list[int] = []
        ordinals: list[int] = []
        samples: list[Found] = []
        bad: list[BadClip] = []
        for slot, (row, ordinal) in enumerate(zip(request.rows.tolist(), request.ordinals.tolist(), strict=True)):
            failed: list[BadClip] = []
            for candidate in _candidates(request, slot, row):
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
        if request.spares is not None:
            reasons = "\n".join(f"  row {clip.row}: {clip.reason}" for clip in failed)
            raise DataError(
                f"micro-batch {request.index} of epoch {request.epoch}, bucket "
                f"{self._policy.buckets[request.bucket].name}: none of {len(failed)} clips could be read; "
                f"repair the files or take them out of the manifest\n{reasons}"
            )


def _candidates(request: BatchRequest, slot: int, row: int) -> Iterator[int]:
    yield row
    tried = {row}
    for spare in request.spares[slot].tolist() if request.spares is not None else ():
        if spare not in tried:
            tried.add(spare)
            yield spare
