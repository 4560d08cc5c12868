"""The reader of micro-batches: samples from media files or from caches, collated.

All that is random about a sample is drawn for its index in the epoch, so workers, ranks and a resume change nothing.
From disk to loss a clip passes seven calls: `Feed.steps`, `read_requests`, `BatchReader.read`, `read_sample`,
`read_clip`, then `step` and `losses` of the training. With a latent cache, its `get` replaces `read_clip`.
Shape letters: B batch, C channels, F frames, H height, W width, N images beside a clip.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from frameloom.config.schema.data import DataSection
from frameloom.core.errors import DataError
from frameloom.data.buckets.policy import Bucket, BucketPolicy
from frameloom.data.cache.external import ExternalLatents, ExternalText
from frameloom.data.cache.store import LatentStore, TextStore
from frameloom.data.loading.batch import (
    NO_ROW,
    BadClip,
    Batch,
    BatchRequest,
    Crops,
    JointImages,
    OnOpen,
    draw_at,
    ignore_open,
)
from frameloom.data.manifest.manifest import ClipRow, Manifest
from frameloom.data.media.decode import ClipError, FatalClip, read_clip, read_image
from frameloom.data.media.frames import clip_window, select_frames
from frameloom.data.media.tar_members import Member
from frameloom.data.media.transforms import ResizeCrop, Transforms, parse_transforms
from frameloom.data.order.plan import Ints

# Sample indices of class pictures begin beyond all that an epoch can have.
CLASS_INDEX_OFFSET = 1 << 40
_NUM_CLASS_DRAWS = 5
_MAX_COMPANION_DRAWS = 9


class Sample(NamedTuple):
    """One clip or image at its bucket's size, and where it was cut from its source; no pixels where latents are read.

    `companions` are rows and pixels [C, 1, H, W] of the images beside a clip.
    """

    row: int
    sample_index: int
    pixels_CFHW: Tensor | None = None
    source: tuple[int, int] = (0, 0)
    top_left: tuple[int, int] = (0, 0)
    control_CFHW: Tensor | None = None
    companions: tuple[tuple[int, Tensor], ...] = ()


@dataclass(frozen=True)
class Stores:
    """What is read instead of encoded: `latents` instead of media files, text by caption or by row."""

    latents: LatentStore | ExternalLatents | None = None
    text: TextStore | None = None
    row_text: ExternalText | None = None


class BatchReader:
    """Reads micro-batches; the result depends on the request alone. Survives pickling, to be used by workers.

    With `class_rows`, every batch is doubled by class pictures for DreamBooth: `rows` are those of its first half only.
    Crops of cached samples cost a lookup each, so they are left out unless `crops_of_latents`.
    """

    def __init__(
        self,
        manifest: Manifest,
        policy: BucketPolicy,
        data: DataSection,
        seed: int,
        stores: Stores | None = None,
        *,
        class_rows: Ints | None = None,
        crops_of_latents: bool = False,
    ) -> None:
        self.manifest, self.policy, self.data, self.seed = manifest, policy, data, seed
        stores = stores or Stores()
        self.latents, self.text, self.row_text = stores.latents, stores.text, stores.row_text
        self._class_rows = class_rows
        self._has_crops = self.latents is None or crops_of_latents
        self._transforms = Transforms(parse_transforms(data.transforms))
        self._has_windows = "start_frame" in manifest.columns
        if data.control:
            refuse_without_control(manifest)

    def without_text(self) -> Self:
        """The same reader for a run that has its text in a table: batches carry no text states."""
        reader = copy.copy(self)
        reader.text = None
        return reader

    def name(self, row: int) -> str:
        """The name of a row in messages: its path."""
        return self.manifest.clip(row).path

    def read(self, request: BatchRequest, on_open: OnOpen = ignore_open) -> Batch:
        """Where a clip is bad, one of its fallback rows is read; without those it leaves no sample behind."""
        bucket, epoch = self.policy.buckets[request.bucket], request.epoch
        samples: list[Sample] = []
        bad: list[BadClip] = []
        bad_companions: list[BadClip] = []
        is_plain = self.latents is not None and not (self._has_crops or self.latents.may_refuse)
        if is_plain and on_open is ignore_open:
            wanted = zip(request.rows.tolist(), request.sample_indices.tolist(), strict=True)
            return self._collate(request, bucket, [Sample(row, index) for row, index in wanted], [])
        for index, candidates, may_miss in self._list_candidates(request, samples):
            failed: list[BadClip] = []
            for row in dict.fromkeys(candidates):
                try:
                    on_open(row)
                    sample = self.read_sample(row, bucket, epoch, index)
                    if self.data.use_image_num and bucket.frames > 1 and self.latents is None:
                        companions = self._read_companions(sample, bucket, epoch, on_open, bad_companions)
                        sample = sample._replace(companions=companions)
                except ClipError as error:
                    failed.append(self._note_bad(row, error, epoch, index))
                    continue
                samples.append(sample)
                break
            else:
                if not may_miss:
                    reasons = "\n".join(f"  row {clip.row}: {clip.reason}" for clip in failed)
                    raise DataError(
                        f"micro-batch {request.index} of epoch {epoch}, bucket {bucket.name}: none of {len(failed)} "
                        f"clips could be read; repair the files or take them out of the manifest\n{reasons}"
                    )
            bad += failed
        on_open(NO_ROW)
        return self._collate(request, bucket, samples, bad + bad_companions)

    def _list_candidates(
        self, request: BatchRequest, samples: Sequence[Sample]
    ) -> Iterator[tuple[int, list[int], bool]]:
        """(sample index, rows to try, whether it may be left out): those of the request, then, where there are class
        pictures, one for each of the samples that were read by then."""
        for number, (row, index) in enumerate(zip(request.rows.tolist(), request.sample_indices.tolist(), strict=True)):
            fallbacks = None if request.fallback_rows is None else request.fallback_rows[number].tolist()
            yield index, [row, *(fallbacks or ())], fallbacks is None
        for own in tuple(samples) if self._class_rows is not None else ():
            draws = (
                draw_at(self.seed, "pair", request.epoch, own.sample_index, number)
                for number in range(_NUM_CLASS_DRAWS)
            )
            assert self._class_rows is not None
            rows = [int(self._class_rows[int(draw * len(self._class_rows))]) for draw in draws]
            yield own.sample_index + CLASS_INDEX_OFFSET, rows, False

    def _note_bad(self, row: int, error: ClipError, epoch: int, index: int) -> BadClip:
        return BadClip(row, self.name(row), str(error), epoch, index, isinstance(error, FatalClip))

    def read_sample(
        self, row: int, bucket: Bucket, epoch: int, index: int, *, purpose: str = "", number: int = 0
    ) -> Sample:
        """One clip at its bucket's size, uint8, and its crop; ClipError if its file is bad.

        `purpose` and `number` keep the draws of images beside a clip apart from its own.
        """
        if self.latents is not None:
            self.latents.check(row, bucket)
            if not self._has_crops:
                return Sample(row, index)
            # A cache holds no random crops, so the box of a cut follows from the size of the source.
            clip = self.manifest.clip(row)
            crop = self._transforms.place(clip.height, clip.width, bucket.height, bucket.width)
            return Sample(row, index, source=(clip.height, clip.width), top_left=(crop.top, crop.left))

        def draw(what: str) -> float:
            return draw_at(self.seed, purpose + what, epoch, index, number)

        draws = (draw("crop_top"), draw("crop_left")) if self._transforms.is_random else (0.0, 0.0)
        cuts: list[tuple[tuple[int, int], ResizeCrop]] = []

        def cut(height: int, width: int) -> ResizeCrop:
            cuts.append(((height, width), self._transforms.place(height, width, bucket.height, bucket.width, draws)))
            return cuts[-1][1]

        clip, control = self.manifest.clip(row), self.data.control and not purpose
        try:
            files: list[Path | Member] = [self.manifest.member(row) or self.manifest.file(row)]
            if control:
                # The same draws give the same frames and the same part of the picture, whatever size it has.
                path = self.manifest.control_file(row)
                if path is None:
                    raise ClipError(f"{clip.path}: has no control clip")
                files.append(path)
            frames = None if clip.kind == "image" else self._select_frames(clip, bucket, draw("frame_start"))
        except ClipError:
            raise
        except DataError as error:
            raise ClipError(str(error)) from error
        height, width, read = bucket.height, bucket.width, pick_decoder(self.data.decoder)
        found = [
            read_image(file, height=height, width=width, crop_rule=cut)
            if frames is None
            else read(file, indices=frames, height=height, width=width, crop_rule=cut)
            for file in files
        ]
        source, crop = cuts[0]
        top_left = (crop.top, crop.left)
        if self.data.flip and draw("flip") < self.data.flip:
            # The picture is what it would be had the source been mirrored, and so is the box of the cut.
            top_left = (crop.top, crop.width - bucket.width - crop.left)
            found = [pixels_CFHW.flip(-1) for pixels_CFHW in found]
        return Sample(row, index, found[0], source, top_left, found[1] if control else None)

    def _select_frames(self, clip: ClipRow, bucket: Bucket, draw: float) -> Ints:
        window = clip_window(clip.frames)
        if self._has_windows:
            ends = self.manifest.column("end_frame") if "end_frame" in self.manifest.columns else None
            start = self.manifest.column("start_frame")[clip.row]
            window = clip_window(clip.frames, start, None if ends is None else ends[clip.row])
        assert clip.fps is not None
        return select_frames(
            window,
            bucket.frames,
            fps=clip.fps,
            interval=int(self.policy.intervals(np.array([clip.fps]))[0]),
            rule=self.policy.frame_rule,
            start_rule=self.data.frame_start,
            draw=draw,
        )

    def _read_companions(
        self, sample: Sample, bucket: Bucket, epoch: int, on_open: OnOpen, bad: list[BadClip]
    ) -> tuple[tuple[int, Tensor], ...]:
        """The images beside a clip: its own frames, or images drawn from the manifest; those that cannot be read are
        replaced and added to `bad`."""
        count = self.data.use_image_num
        if self.data.use_img_from_vid:
            assert sample.pixels_CFHW is not None
            frames = np.linspace(0, sample.pixels_CFHW.shape[1] - 1, count).astype(np.int64).tolist()
            return tuple((sample.row, sample.pixels_CFHW[:, frame : frame + 1]) for frame in frames)
        found: list[tuple[int, Tensor]] = []
        for number in range(count):
            failed: list[BadClip] = []
            for attempt in range(_MAX_COMPANION_DRAWS):
                drawn = draw_at(self.seed, f"joint image {attempt}", epoch, sample.sample_index, number)
                row = int(self._image_rows[int(drawn * len(self._image_rows))])
                try:
                    on_open(row)
                    image = self.read_sample(row, bucket, epoch, sample.sample_index, purpose="joint ", number=number)
                except ClipError as error:
                    failed.append(self._note_bad(row, error, epoch, sample.sample_index))
                    continue
                assert image.pixels_CFHW is not None
                found.append((row, image.pixels_CFHW))
                break
            else:
                reasons = "\n".join(f"  row {clip.row}: {clip.reason}" for clip in failed)
                raise DataError(f"none of {len(failed)} images drawn to go beside a video could be read\n{reasons}")
            bad += failed
        return tuple(found)

    @cached_property
    def _image_rows(self) -> Ints:
        rows = np.flatnonzero(np.isnan(self.manifest.fps))
        if not len(rows):
            raise DataError(
                f"{self.manifest.source}: use_image_num is {self.data.use_image_num}, but no row is an image; "
                "add images, or set use_img_from_vid"
            )
        return rows

    def _collate(self, request: BatchRequest, bucket: Bucket, samples: list[Sample], bad: list[BadClip]) -> Batch:
        rows = np.array([one.row for one in samples], dtype=np.int64)
        indices = np.array([one.sample_index for one in samples], dtype=np.int64)
        captions = self._choose_captions(rows, indices, request.epoch)
        own_rows = rows[indices < CLASS_INDEX_OFFSET]
        batch = Batch(request.epoch, request.index, bucket, own_rows, indices, captions, bad=bad)
        if self._has_crops:
            batch.crops = Crops(
                *(
                    torch.tensor(pairs, dtype=torch.int64).reshape(len(samples), 2)
                    for pairs in (
                        [one.source for one in samples],
                        [one.top_left for one in samples],
                        [(bucket.height, bucket.width)] * len(samples),
                    )
                )
            )
        if self.latents is None:
            empty = torch.empty((0, 3, bucket.frames, bucket.height, bucket.width), dtype=torch.uint8)
            pixels = [one.pixels_CFHW for one in samples if one.pixels_CFHW is not None]
            batch.pixels_BCFHW = torch.stack(pixels) if pixels else empty
            if self.data.control:
                controls = [one.control_CFHW for one in samples if one.control_CFHW is not None]
                batch.control_BCFHW = torch.stack(controls) if controls else empty
        if not samples:
            return batch
        if self.latents is not None:
            batch.latents = self.latents.get(rows, bucket)
        if self.row_text is not None:
            batch.text = self.row_text.get_rows(rows)
        elif self.text is not None:
            batch.text = self.text.get(captions)
        if samples[0].companions:
            batch.images = self._collate_companions(samples)
        return batch

    def _collate_companions(self, samples: list[Sample]) -> JointImages:
        beside = [one.companions for one in samples]
        rows_BN = np.array([[row for row, _ in images] for images in beside], dtype=np.int64)
        captions = [self.manifest.captions(rows_N) for rows_N in rows_BN]
        return JointImages(
            pixels_BCNHW=torch.stack([torch.cat([pixels for _, pixels in images], dim=1) for images in beside]),
            rows_BN=rows_BN,
            captions=captions,
            text=None if self.text is None else self.text.get([text for texts in captions for text in texts]),
        )

    def _choose_captions(self, rows: Ints, indices: Ints, epoch: int) -> list[str]:
        """One caption a sample; of several, the first or another one each time."""
        if self.data.caption_choice == "first" or "captions" not in self.manifest.columns:
            return self.manifest.captions(rows)
        chosen = []
        for row, index in zip(rows.tolist(), indices.tolist(), strict=True):
            several = self.manifest.all_captions(row)
            chosen.append(several[int(draw_at(self.seed, "caption", epoch, index) * len(several))])
        return chosen

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_image_rows"}


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


def pick_decoder(name: Literal["pyav", "torchcodec"]) -> Callable[..., Tensor]:
    """`read_clip` of a decoder; MissingExtra if its package is not installed."""
    if name == "pyav":
        return read_clip
    from frameloom.data.media.torchcodec_backend import read_clip as read_clip_torchcodec

    return read_clip_torchcodec
