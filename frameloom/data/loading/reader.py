"""Readers of micro-batches: pixels from media files, or latents from a cache.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.errors import ConfigError, DataError
from frameloom.data.buckets.policy import Bucket, BucketPolicy
from frameloom.data.loading.bad_clips import Slots
from frameloom.data.loading.batch import NO_ROW, BadClip, Batch, BatchRequest, Crops, OnOpen, draw_at, ignore_open
from frameloom.data.loading.companions import Beside, JointSource
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.decode import LIMITS, ClipError, DecodeLimits, PlaceRule, read_clip, read_image
from frameloom.data.media.frames import START_RULES, StartRule, clip_window, select_frames
from frameloom.data.media.transforms import CenterCrop, Cover, Resize, Transform, Transforms

Decoder = Literal["pyav", "torchcodec"]
CaptionChoice = Literal["first", "random"]


@dataclass(frozen=True)
class ReadSettings:
    """How pixels are taken from a file; how frames are spaced is up to the bucket policy, which counts them.

    `use_image_num` puts so many images beside every video (joint training): frames of the video itself with
    `use_img_from_vid`, else images of the manifest, drawn for each sample. `caption_choice` is which caption a clip
    with several of them gets. `control` reads the control clip of each row, too: the same frames, the same cut.
    """

    frame_start: StartRule = "random"
    flip_probability: float = 0.0
    limits: DecodeLimits = LIMITS
    transforms: tuple[Transform, ...] = (Resize(), CenterCrop())
    decoder: Decoder = "pyav"
    use_image_num: int = 0
    use_img_from_vid: bool = False
    caption_choice: CaptionChoice = "random"
    control: bool = False

    def __post_init__(self) -> None:
        if self.frame_start not in START_RULES:
            raise ConfigError(f"frame_start is {self.frame_start!r}; it must be one of {', '.join(START_RULES)}")
        if not 0 <= self.flip_probability <= 1:
            raise ConfigError(f"flip_probability is {self.flip_probability}; it must be from 0 to 1")
        if self.use_image_num < 0:
            raise ConfigError(f"use_image_num is {self.use_image_num}; it must be 0 or more")
        Transforms(self.transforms)


class Sample(NamedTuple):
    """One clip or image at its bucket's size, and where it was cut from its source."""

    pixels_CFHW: Tensor
    original: tuple[int, int]
    top_left: tuple[int, int]
    control_CFHW: Tensor | None = None


class TextSource(Protocol):
    """A text cache, as far as readers know it."""

    def get(self, captions: list[str]) -> dict[str, Tensor]: ...


class LatentSource(Protocol):
    """A latent cache, as far as readers know it."""

    def get(self, rows: NDArray[np.int64], bucket: Bucket) -> tuple[Tensor, Tensor]: ...

    @property
    def may_refuse(self) -> bool:
        """Whether there are rows that `check` refuses."""

    def check(self, row: int, bucket: Bucket) -> None:
        """ClipError if the row was unreadable when the cache was written."""
        ...


class ClipReader:
    """Reads pixels from media files."""

    def __init__(
        self,
        manifest: Manifest,
        policy: BucketPolicy,
        *,
        seed: int,
        settings: ReadSettings | None = None,
        text: TextSource | None = None,
    ) -> None:
        self.manifest = manifest
        self.policy = policy
        self.seed = seed
        self.settings = settings or ReadSettings()
        self.text = text
        self._slots = Slots(manifest, policy)
        self._joint = self._build_joint() if self.settings.use_image_num else None
        self._transforms = Transforms(self.settings.transforms)
        self._has_windows = "start_frame" in manifest.columns
        if self.settings.control:
            refuse_without_control(manifest)

    def name(self, row: int) -> str:
        return self.manifest.clip(row).path

    def read(self, request: BatchRequest, on_open: OnOpen = ignore_open) -> Batch:
        bucket = self.policy.buckets[request.bucket]

        joint = self._joint if bucket.frames > 1 else None
        bad_images: list[BadClip] = []

        def read_row(row: int, ordinal: int) -> tuple[Sample, Beside]:
            def read_beside(image: int, number: int) -> Tensor:
                on_open(image)
                return self.read_sample(
                    image, bucket, request.epoch, ordinal, purpose="joint ", number=number
                ).pixels_CFHW

            on_open(row)
            clip = self.read_sample(row, bucket, request.epoch, ordinal)
            if joint is None:
                return clip, []
            return clip, joint.read(clip.pixels_CFHW, row, request.epoch, ordinal, read_beside, bad_images)

        rows, ordinals, found, bad = self._slots.fill(request, read_row)
        on_open(NO_ROW)
        choice = self.settings.caption_choice
        captions = choose_captions(self.manifest, rows, ordinals, seed=self.seed, epoch=request.epoch, choice=choice)
        batch = _start_batch(request, bucket, rows, ordinals, bad + bad_images, captions, self.text)
        clips = [clip for clip, _ in found]
        batch.pixels_BCFHW = (
            torch.stack([clip.pixels_CFHW for clip in clips])
            if clips
            else torch.empty((0, 3, bucket.frames, bucket.height, bucket.width), dtype=torch.uint8)
        )
        batch.crops = _stack_crops([(clip.original, clip.top_left) for clip in clips], bucket)
        if self.settings.control:
            controls = [clip.control_CFHW for clip in clips if clip.control_CFHW is not None]
            batch.control_BCFHW = torch.stack(controls) if controls else torch.empty_like(batch.pixels_BCFHW)
        if joint is not None and found:
            batch.images = joint.join([beside for _, beside in found])
            if self.text is not None:
                batch.images.text = self.text.get([text for beside in batch.images.captions for text in beside])
        return batch

    def read_sample(
        self, row: int, bucket: Bucket, epoch: int, ordinal: int, *, purpose: str = "", number: int = 0
    ) -> Sample:
        """One clip at its bucket's size, uint8, and its crop; ClipError if its file is bad.

        `purpose` and `number` keep the draws of images beside a clip apart from its own.
        """
        settings = self.settings

        def draw(what: str) -> float:
            return draw_at(self.seed, purpose + what, epoch, ordinal, number)

        source, spot = (0, 0), Cover(0, 0, 0, 0)

        def cut(height: int, width: int) -> Cover:
            draws = (draw("crop_top"), draw("crop_left")) if self._transforms.is_random else (0.0, 0.0)
            return self._transforms.place(height, width, bucket.height, bucket.width, draws)

        def place(height: int, width: int) -> Cover:
            nonlocal source, spot
            source, spot = (height, width), cut(height, width)
            return spot

        pixels_CFHW = self._read_file(row, bucket, place, draw)
        control_CFHW = None
        if settings.control and not purpose:
            # The same draws give the same frames and the same part of the picture, whatever size it has.
            control_CFHW = self._read_file(row, bucket, cut, draw, path=self._find_control(row))
        if settings.flip_probability and draw("flip") < settings.flip_probability:
            # The picture is what it would be had the source been mirrored, and so is the place of the cut.
            left = spot.width - bucket.width - spot.left
            mirrored = None if control_CFHW is None else control_CFHW.flip(-1)
            return Sample(pixels_CFHW.flip(-1), source, (spot.top, left), mirrored)
        return Sample(pixels_CFHW, source, (spot.top, spot.left), control_CFHW)

    def _find_control(self, row: int) -> Path:
        try:
            path = self.manifest.control_file(row)
        except DataError as error:
            raise ClipError(str(error)) from error
        if path is None:
            raise ClipError(f"{self.name(row)}: has no control clip")
        return path

    def _read_file(
        self, row: int, bucket: Bucket, place: PlaceRule, draw: Callable[[str], float], *, path: Path | None = None
    ) -> Tensor:
        """The frames of a row's own file, or the same frames of another one at `path`."""
        clip = self.manifest.clip(row)
        size = {"height": bucket.height, "width": bucket.width}
        try:
            place_of_file = path or self.manifest.member(row) or self.manifest.file(row)
            if clip.kind == "image":
                return read_image(place_of_file, **size, limits=self.settings.limits, place=place)
            assert clip.fps is not None
            indices = select_frames(
                clip_window(clip.frames, *self._window(row)),
                bucket.frames,
                fps=clip.fps,
                interval=int(self.policy.intervals(np.array([clip.fps]))[0]),
                rule=self.policy.frame_rule,
                start_rule=self.settings.frame_start,
                draw=draw("frame_start"),
            )
        except ClipError:
            raise
        except DataError as error:
            raise ClipError(str(error)) from error
        read = pick_decoder(self.settings.decoder)
        return read(place_of_file, indices=indices, **size, limits=self.settings.limits, place=place)

    def _build_joint(self) -> JointSource:
        settings = self.settings
        return JointSource(
            self.manifest,
            seed=self.seed,
            count=settings.use_image_num,
            own_frames=settings.use_img_from_vid,
        )

    def _window(self, row: int) -> tuple[int | None, int | None]:
        if not self._has_windows:
            return None, None
        has_end = "end_frame" in self.manifest.columns
        start = self.manifest.column("start_frame")[row]
        return start, self.manifest.column("end_frame")[row] if has_end else None


def refuse_without_control(manifest: Manifest) -> None:
    """DataError unless every row names a control clip."""
    if "control" not in manifest.columns:
        raise DataError(
            f"{manifest.source}: no column 'control' (or 'control_file_path') names control clips, which data.control "
            "asks for; add it with the path of a video beside each clip"
        )
    if num_without := manifest.column("control").null_count():
        raise DataError(
            f"{manifest.source}: {num_without} of {len(manifest)} rows have no control clip, which data.control asks "
            'for; fill the column in, or leave these rows out with data.where: "control is not null"'
        )


def pick_decoder(name: Decoder) -> Callable[..., Tensor]:
    """`read_clip` of a decoder; MissingExtra if its package is not installed."""
    if name == "pyav":
        return read_clip
    from frameloom.data.media.torchcodec_backend import read_clip as read_clip_torchcodec

    return read_clip_torchcodec


def _stack_crops(places: list[tuple[tuple[int, int], tuple[int, int]]], bucket: Bucket) -> Crops:
    """From (size of the source, top and left of the cut) of each sample."""

    def stack(pairs: list[tuple[int, int]]) -> Tensor:
        return torch.tensor(pairs, dtype=torch.int64).reshape(len(pairs), 2)

    return Crops(
        original_B2=stack([original for original, _ in places]),
        top_left_B2=stack([top_left for _, top_left in places]),
        target_B2=stack([(bucket.height, bucket.width)] * len(places)),
    )


class CachedReader:
    """Reads latents from a cache, with the same rows in the same slots as a `ClipReader`.

    With `transforms`, those the cache was made with, batches say where their samples were cut.
    """

    def __init__(
        self,
        manifest: Manifest,
        policy: BucketPolicy,
        latents: LatentSource,
        *,
        seed: int,
        text: TextSource | None = None,
        transforms: tuple[Transform, ...] | None = None,
        caption_choice: CaptionChoice = "random",
    ) -> None:
        self.manifest = manifest
        self.seed = seed
        self._caption_choice = caption_choice
        self.policy = policy
        self.latents = latents
        self.text = text
        self._transforms = None if transforms is None else Transforms(transforms)
        self._slots = Slots(manifest, policy)

    def name(self, row: int) -> str:
        return self.manifest.clip(row).path

    def read(self, request: BatchRequest, on_open: OnOpen = ignore_open) -> Batch:
        bucket = self.policy.buckets[request.bucket]

        def check(row: int, ordinal: int) -> None:
            on_open(row)
            self.latents.check(row, bucket)

        rows, ordinals = request.rows.tolist(), request.ordinals.tolist()
        bad: list[BadClip] = []
        if on_open is not ignore_open or self.latents.may_refuse:
            rows, ordinals, _, bad = self._slots.fill(request, check)
        captions = choose_captions(
            self.manifest, rows, ordinals, seed=self.seed, epoch=request.epoch, choice=self._caption_choice
        )
        batch = _start_batch(request, bucket, rows, ordinals, bad, captions, self.text)
        on_open(NO_ROW)
        if rows:
            batch.latents = self.latents.get(batch.rows, bucket)
        if self._transforms is not None:
            batch.crops = self._crops(batch.rows, bucket, self._transforms)
        return batch

    def _crops(self, rows: NDArray[np.int64], bucket: Bucket, transforms: Transforms) -> Crops:
        """A cache holds no random crops, so the place of a cut follows from the size of the source."""
        clips = [self.manifest.clip(int(row)) for row in rows]
        sizes = [(clip.height, clip.width) for clip in clips]
        spots = [transforms.place(*size, bucket.height, bucket.width, (0.0, 0.0)) for size in sizes]
        pairs = zip(sizes, spots, strict=True)
        return _stack_crops([(size, (spot.top, spot.left)) for size, spot in pairs], bucket)


def choose_captions(
    manifest: Manifest, rows: list[int], ordinals: list[int], *, seed: int, epoch: int, choice: CaptionChoice
) -> list[str]:
    """One caption a sample; of several, the first or another one each time."""
    if choice == "first" or "captions" not in manifest.columns:
        return manifest.captions(rows)
    chosen = []
    for row, ordinal in zip(rows, ordinals, strict=True):
        several = manifest.all_captions(row)
        chosen.append(several[int(draw_at(seed, "caption", epoch, ordinal) * len(several))])
    return chosen


def _start_batch(
    request: BatchRequest,
    bucket: Bucket,
    rows: list[int],
    ordinals: list[int],
    bad: list[BadClip],
    captions: list[str],
    text: TextSource | None,
) -> Batch:
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
