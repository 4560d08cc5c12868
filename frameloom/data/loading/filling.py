"""The slots of a micro-batch: filled one by one, unreadable clips replaced deterministically, images beside clips.

Which images go beside a clip is drawn for the clip's slot, so workers, ranks and a resume change nothing.
Shape letters: B batch, C channels, F frames, N images beside a clip, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.errors import DataError
from frameloom.core.random import key, uniform_at
from frameloom.data.buckets.policy import BucketPolicy
from frameloom.data.loading.batch import BadClip, BatchRequest, JointImages
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.decode import ClipError, FatalClip

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


_MAX_REPLACEMENTS = 8
# (row, number of the image beside its clip) -> pixels [C, 1, H, W]; ClipError if the file is bad
ReadImage = Callable[[int, int], Tensor]
Beside = list[tuple[int, Tensor]]
"""rows and pixels [C, 1, H, W] of the images beside one clip"""


class JointSource:
    """Chooses `count` images for each clip: its own frames, or images of the manifest."""

    def __init__(self, manifest: Manifest, *, seed: int, count: int, own_frames: bool) -> None:
        self.count = count
        self._manifest = manifest
        self._seed = seed
        self._own_frames = own_frames

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        rows = np.flatnonzero(np.isnan(self._manifest.fps))
        if not len(rows):
            raise DataError(
                f"{self._manifest.source}: use_image_num is {self.count}, but no row is an image; "
                "add images, or set use_img_from_vid"
            )
        return rows

    def read(
        self, clip_CFHW: Tensor, row: int, epoch: int, ordinal: int, read_image: ReadImage, bad: list[BadClip]
    ) -> Beside:
        """The images beside one clip; those that cannot be read are replaced and added to `bad`."""
        if self._own_frames:
            frames = np.linspace(0, clip_CFHW.shape[1] - 1, self.count).astype(np.int64).tolist()
            return [(row, clip_CFHW[:, frame : frame + 1]) for frame in frames]
        return [self._draw(number, epoch, ordinal, read_image, bad) for number in range(self.count)]

    def _draw(
        self, number: int, epoch: int, ordinal: int, read_image: ReadImage, bad: list[BadClip]
    ) -> tuple[int, Tensor]:
        failed: list[BadClip] = []
        for attempt in range(1 + _MAX_REPLACEMENTS):
            draw = draw_at(self._seed, f"joint image {attempt}", epoch, ordinal, number)
            row = int(self._rows[int(draw * len(self._rows))])
            try:
                pixels_C1HW = read_image(row, number)
            except ClipError as error:
                failed.append(note_bad(self._manifest, row, error, epoch, ordinal))
                continue
            bad += failed
            return row, pixels_C1HW
        reasons = "\n".join(f"  row {clip.row}: {clip.reason}" for clip in failed)
        raise DataError(f"none of {len(failed)} images drawn to go beside a video could be read\n{reasons}")

    def join(self, images: list[Beside]) -> JointImages:
        """Those of all clips of a batch, at least one, with their captions."""
        rows_BN = np.array([[row for row, _ in beside] for beside in images], dtype=np.int64)
        return JointImages(
            pixels_BCNHW=torch.stack([torch.cat([pixels for _, pixels in beside], dim=1) for beside in images]),
            rows_BN=rows_BN,
            captions=[self._manifest.captions(rows_N) for rows_N in rows_BN],
        )

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}
