"""Extra samples beside those of the plan: images beside videos (joint training), class images for DreamBooth.

Both are drawn for the slot of the sample they accompany, so workers, ranks and a resume change nothing.
Shape letters: B batch, C channels, F frames, N images beside a clip, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.errors import DataError
from frameloom.data.loading.bad_clips import note_bad
from frameloom.data.loading.batch import (
    BadClip,
    Batch,
    BatchReader,
    BatchRequest,
    Crops,
    JointImages,
    OnOpen,
    draw_at,
    ignore_open,
)
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.decode import ClipError

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


# Slots of the second half, beyond all that an epoch can have.
PAIR_SLOT = 1 << 40
_NUM_SPARES = 4


class PairedReader:
    """Doubles every batch: the first half is the plan's, the second has a row drawn from `rows` for each slot of it.

    The `rows` of a batch are those of the first half only.
    """

    def __init__(self, reader: BatchReader, rows: NDArray[np.int64], *, seed: int) -> None:
        self._reader, self._rows, self._seed = reader, rows, seed

    def name(self, row: int) -> str:
        return self._reader.name(row)

    def read(self, request: BatchRequest, on_open: OnOpen = ignore_open) -> Batch:
        first = self._reader.read(request, on_open)
        drawn = np.array([self._draw(request.epoch, int(ordinal)) for ordinal in first.ordinals], dtype=np.int64)
        drawn = drawn.reshape(len(first.ordinals), 1 + _NUM_SPARES)
        second = self._reader.read(
            replace(request, rows=drawn[:, 0], ordinals=first.ordinals + PAIR_SLOT, spares=drawn[:, 1:]), on_open
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
