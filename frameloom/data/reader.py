"""Micro-batches from media files or from a latent cache, with bad clips replaced deterministically.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.errors import ConfigError, DataError
from frameloom.core.random import key, uniform_at
from frameloom.data.batch import BadClip, Batch, BatchRequest, Watch, no_watch
from frameloom.data.buckets import assign, sample_rate
from frameloom.data.decode import LIMITS, ClipError, DecodeLimits, read_clip, read_image
from frameloom.data.frames import START_RULES, StartRule, frame_indices
from frameloom.data.grid import Bucket, GridConfig
from frameloom.data.manifest import Manifest

Sample = TypeVar("Sample")


@dataclass(frozen=True)
class ReadSettings:
    """How frames are taken from a file."""

    frame_start: StartRule = "random"
    flip_probability: float = 0.0
    max_replacements: int = 8
    limits: DecodeLimits = LIMITS

    def __post_init__(self) -> None:
        if self.frame_start not in START_RULES:
            raise ConfigError(f"frame_start is {self.frame_start!r}; it must be one of {', '.join(START_RULES)}")
        if not 0 <= self.flip_probability <= 1:
            raise ConfigError(f"flip_probability is {self.flip_probability}; it must be from 0 to 1")


def draw_at(seed: int, purpose: str, epoch: int, ordinal: int, number: int = 0) -> float:
    """One uniform number in [0, 1) for one sample."""
    return float(uniform_at(key(seed, purpose, epoch, ordinal), np.array([number]))[0])


class TextSource(Protocol):
    """A text cache, as far as readers know it."""

    def get(self, captions: list[str]) -> dict[str, Tensor]: ...


class LatentSource(Protocol):
    """A latent cache, as far as readers know it."""

    def get(self, rows: NDArray[np.int64], bucket: Bucket) -> tuple[Tensor, Tensor]: ...

    def check(self, row: int, bucket: Bucket) -> None:
        """ClipError if the row was unreadable when the cache was written."""
        ...


class _Slots:
    """Fills the slots of a request one by one, trying other rows of the same bucket where a clip is bad."""

    def __init__(self, manifest: Manifest, grid: GridConfig, seed: int, max_replacements: int) -> None:
        self._manifest = manifest
        self._grid = grid
        self._seed = seed
        self._max_replacements = max_replacements
        # Only looked up after the first bad clip of an epoch, so it is not worth sending to workers.
        self._assignment: tuple[int, NDArray[np.int32]] | None = None

    def fill(
        self, request: BatchRequest, read_row: Callable[[int, int], Sample]
    ) -> tuple[list[int], list[int], list[Sample], list[BadClip]]:
        """(rows read, their ordinals, what `read_row(row, ordinal)` gave, the bad ones).

        With `max_replacements` 0 a bad clip leaves no sample behind; else not finding a good one is an error.
        """
        rows: list[int] = []
        ordinals: list[int] = []
        samples: list[Sample] = []
        bad: list[BadClip] = []
        for row, ordinal in zip(request.rows.tolist(), request.ordinals.tolist(), strict=True):
            failed: list[BadClip] = []
            for candidate in self._candidates(request, row, ordinal):
                try:
                    samples.append(read_row(candidate, ordinal))
                except ClipError as error:
                    path = self._manifest.clip(candidate).path
                    failed.append(BadClip(candidate, path, str(error), request.epoch, ordinal))
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


class ClipReader:
    """Reads pixels from media files. Give `max_replacements=0` to get smaller batches instead of replacements."""

    def __init__(
        self,
        manifest: Manifest,
        grid: GridConfig,
        *,
        seed: int,
        settings: ReadSettings | None = None,
        text: TextSource | None = None,
    ) -> None:
        self.manifest = manifest
        self.grid = grid
        self.seed = seed
        self.settings = settings or ReadSettings()
        self.text = text
        self._slots = _Slots(manifest, grid, seed, self.settings.max_replacements)

    def name(self, row: int) -> str:
        return self.manifest.clip(row).path

    def read(self, request: BatchRequest, watch: Watch = no_watch) -> Batch:
        bucket = self.grid.buckets[request.bucket]

        def read_row(row: int, ordinal: int) -> Tensor:
            watch(row)
            return self.read_pixels(row, bucket, request.epoch, ordinal)

        rows, ordinals, clips, bad = self._slots.fill(request, read_row)
        batch = _start_batch(request, bucket, rows, ordinals, bad, self.manifest, self.text)
        batch.pixels_BCFHW = (
            torch.stack(clips)
            if clips
            else torch.empty((0, 3, bucket.frames, bucket.height, bucket.width), dtype=torch.uint8)
        )
        return batch

    def read_pixels(self, row: int, bucket: Bucket, epoch: int, ordinal: int) -> Tensor:
        """One clip at its bucket's size, uint8 [C, F, H, W]; ClipError if its file is bad."""
        clip = self.manifest.clip(row)
        settings = self.settings
        try:
            path = self.manifest.file(row)
        except DataError as error:
            raise ClipError(str(error)) from error
        if clip.kind == "image":
            pixels_CFHW = read_image(path, height=bucket.height, width=bucket.width, limits=settings.limits)
        else:
            _, interval = sample_rate(np.array([clip.fps]), self.grid.fps_max)
            draw = draw_at(self.seed, "frame_start", epoch, ordinal)
            indices = frame_indices(clip.frames, bucket.frames, int(interval[0]), settings.frame_start, draw)
            pixels_CFHW = read_clip(
                path, indices=indices, height=bucket.height, width=bucket.width, limits=settings.limits
            )
        if settings.flip_probability and draw_at(self.seed, "flip", epoch, ordinal) < settings.flip_probability:
            pixels_CFHW = pixels_CFHW.flip(-1)
        return pixels_CFHW


class CachedReader:
    """Reads latents from a cache, with the same rows in the same slots as a `ClipReader`."""

    def __init__(
        self,
        manifest: Manifest,
        grid: GridConfig,
        latents: LatentSource,
        *,
        seed: int,
        text: TextSource | None = None,
        max_replacements: int = ReadSettings.max_replacements,
    ) -> None:
        self.manifest = manifest
        self.grid = grid
        self.latents = latents
        self.text = text
        self._slots = _Slots(manifest, grid, seed, max_replacements)

    def name(self, row: int) -> str:
        return self.manifest.clip(row).path

    def read(self, request: BatchRequest, watch: Watch = no_watch) -> Batch:
        bucket = self.grid.buckets[request.bucket]
        rows, ordinals, _, bad = self._slots.fill(request, lambda row, _: self.latents.check(row, bucket))
        batch = _start_batch(request, bucket, rows, ordinals, bad, self.manifest, self.text)
        if rows:
            watch(rows[0])
            batch.latents = self.latents.get(batch.rows, bucket)
        return batch


def _start_batch(
    request: BatchRequest,
    bucket: Bucket,
    rows: list[int],
    ordinals: list[int],
    bad: list[BadClip],
    manifest: Manifest,
    text: TextSource | None,
) -> Batch:
    captions = manifest.captions(rows)
    return Batch(
        epoch=request.epoch,
        index=request.index,
        bucket=bucket,
        rows=np.array(rows, dtype=np.int64),
        ordinals=np.array(ordinals, dtype=np.int64),
        captions=captions,
        text=text.get(captions) if text is not None else None,
        bad=bad,
    )
