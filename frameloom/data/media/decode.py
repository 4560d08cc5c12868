"""Decoding of clips and images: known containers only, sizes checked from the header, one thread.

A clip is decoded from the key frame before the first frame that is needed to the last one, and each needed frame is
scaled inside the decoder's library; the whole video is never in memory. Frames are numbered in presentation order.
Shape letters: C channels, F frames, H height, W width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.container import InputContainer
from av.error import FFmpegError
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Interpolation, VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from frameloom.core.errors import DataError
from frameloom.data.media.tar_members import Member, MemberFile
from frameloom.data.media.transforms import CropRule, ResizeCrop, cover_rule

Media = Path | Member
"""A file, or a part of a tar."""

# Extension to demuxer. Nothing here can point to another file, as playlists and concat scripts do.
VIDEO_FORMATS = {
    ".mp4": "mov,mp4,m4a,3gp,3g2,mj2",
    ".m4v": "mov,mp4,m4a,3gp,3g2,mj2",
    ".mov": "mov,mp4,m4a,3gp,3g2,mj2",
    ".mkv": "matroska,webm",
    ".webm": "matroska,webm",
    ".avi": "avi",
}
IMAGE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}

# Averages when scaling down; the last two make the pixels the same on every processor.
_SCALING = Interpolation.BILINEAR | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND | Interpolation.BITEXACT
# Below this a clip is decoded from its start: finding the right key frame costs more than it saves.
_SEEK_FROM_FRAME = 48


def kind_of(file: str | Media) -> str | None:
    """ "video" or "image" by the ending of a file's name; None for any other ending."""
    suffix = (Path(file) if isinstance(file, str) else file).suffix.lower()
    return "video" if suffix in VIDEO_FORMATS else "image" if suffix in IMAGE_FORMATS else None


class ClipError(DataError):
    """One media file cannot be used; a run replaces it and goes on."""


class FatalClip(ClipError):
    """A file that ended or stalled the process that read it, and is not opened again."""


@dataclass(frozen=True)
class DecodeLimits:
    """What a header may declare before anything is decoded."""

    max_pixels: int = 8192 * 4320
    max_frames: int = 500_000
    max_seconds: float = 4 * 3600.0


LIMITS = DecodeLimits()


@dataclass(frozen=True)
class MediaFacts:
    """What a file is; sizes are as displayed, after rotation. `fps` is the mean rate, None for an image.

    `vfr` says that the steps between frames differ, which `probe_header` alone looks for.
    """

    kind: str
    height: int
    width: int
    frames: int
    fps: float | None
    codec: str
    rotation: int
    vfr: bool = False


def probe_clip(path: Media, *, limits: DecodeLimits = LIMITS) -> MediaFacts:
    """Facts from the header, and the rotation from the first frame, which must decode."""
    with open_video(path, limits) as (container, stream):
        num_frames = stream.frames or len(_packet_times(path, container, stream, limits))
        rate = stream.average_rate or stream.guessed_rate
        if not rate:
            raise ClipError(f"{path}: no frame rate in its header; convert the file or leave it out")
    with open_video(path, limits) as (container, stream):
        first = next(iter(container.decode(stream)), None)
        if first is None or num_frames < 1:
            raise ClipError(f"{path}: no frame in it; leave it out")
        turned = _quarter_turns(first) % 2 == 1
        height, width = (first.width, first.height) if turned else (first.height, first.width)
        codec = stream.codec_context.name
        return MediaFacts("video", height, width, num_frames, float(rate), codec, first.rotation)


def read_clip(
    path: Media,
    *,
    indices: Sequence[int] | NDArray[np.int64],
    height: int,
    width: int,
    limits: DecodeLimits = LIMITS,
    crop_rule: CropRule | None = None,
) -> Tensor:
    """The frames `indices` (rising, repeats allowed) scaled and cut to `height` x `width`: uint8 [C, F, H, W].

    Without `crop_rule` the picture is scaled to cover that size and cut in the centre.
    """
    every = check_indices(indices)
    wanted, repeats = np.unique(every, return_inverse=True)
    pixels_CFHW = torch.empty((3, len(wanted), height, width), dtype=torch.uint8)
    crop_rule = crop_rule or cover_rule(height, width)
    # A seek can land wrongly in odd files (open groups of pictures, holes in the index); then the slow way decides.
    for seeks in (True, False) if wanted[0] >= _SEEK_FROM_FRAME else (False,):
        with open_video(path, limits) as (container, stream):
            numbered = (
                _seek_frames(path, container, stream, int(wanted[0]), limits)
                if seeks
                else enumerate(container.decode(stream))
            )
            scaler = _FrameScaler(path, height, width, crop_rule, limits)
            num_found = _fill(pixels_CFHW, numbered, wanted, scaler)
        if num_found == len(wanted):
            return pixels_CFHW if len(wanted) == len(every) else pixels_CFHW[:, torch.from_numpy(repeats)]
    raise ClipError(f"{path}: frame {wanted[num_found]} is not there; the file is cut or its manifest row is wrong")


def check_indices(indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    wanted = np.asarray(indices, dtype=np.int64)
    if not len(wanted) or wanted[0] < 0 or (np.diff(wanted) < 0).any():
        raise ValueError(f"indices must be rising and not negative, got {wanted}")
    return wanted


def check_crop(path: Media, crop: ResizeCrop, height: int, width: int, limits: DecodeLimits) -> ResizeCrop:
    """The same crop; ClipError if the scaled picture is too large, or too small for what is cut out of it."""
    _refuse_large(path, crop.height, crop.width, limits, what="when scaled to cover its bucket")
    if not (0 <= crop.top <= crop.height - height and 0 <= crop.left <= crop.width - width):
        raise ClipError(
            f"{path}: scaled to {crop.width}x{crop.height}, which does not hold {width}x{height} at "
            f"({crop.left}, {crop.top}); resize with fit cover, or choose a bucket policy that goes with this rule"
        )
    return crop


def _fill(
    pixels_CFHW: Tensor,
    numbered: Iterator[tuple[int, VideoFrame]],
    wanted: NDArray[np.int64],
    scaler: _FrameScaler,
) -> int:
    """Store the wanted frames; how many of them were found, in order, before the stream ended or skipped one."""
    found = 0
    for index, frame in numbered:
        if index > wanted[found]:
            return found
        if index == wanted[found]:
            pixels_CFHW[:, found] = torch.from_numpy(scaler.scale(frame)).permute(2, 0, 1)
            found += 1
            if found == len(wanted):
                return found
    return found


class _FrameScaler:
    """Scales and cuts frames that all have the size of the first."""

    def __init__(self, path: Media, height: int, width: int, crop_rule: CropRule, limits: DecodeLimits) -> None:
        self._path, self._height, self._width = path, height, width
        self._rule, self._limits = crop_rule, limits
        self._reformatter = VideoReformatter()
        self._first: tuple[tuple[int, int], ResizeCrop] | None = None

    def scale(self, frame: VideoFrame) -> NDArray[np.uint8]:
        if frame.is_corrupt:
            raise ClipError(f"{self._path}: the frame at {frame.time:.2f} s is damaged; replace the file")
        turns = _quarter_turns(frame)
        size = (frame.height, frame.width) if turns % 2 == 0 else (frame.width, frame.height)
        if self._first is None:
            self._first = size, check_crop(self._path, self._rule(*size), self._height, self._width, self._limits)
        first_size, crop = self._first
        if size != first_size:
            raise ClipError(
                f"{self._path}: the picture changes from {first_size[1]}x{first_size[0]} to "
                f"{size[1]}x{size[0]} on the way; cut the file there"
            )
        scaled_size = (crop.height, crop.width) if turns % 2 == 0 else (crop.width, crop.height)
        scaled = self._reformatter.reformat(
            frame,
            height=scaled_size[0],
            width=scaled_size[1],
            format="rgb24",
            interpolation=_SCALING,
            dst_color_range=ColorRange.JPEG,
            threads=1,
        )
        upright_HWC = np.rot90(scaled.to_ndarray(), turns)
        cut_HWC = upright_HWC[crop.top : crop.top + self._height, crop.left : crop.left + self._width]
        return np.ascontiguousarray(cut_HWC, dtype=np.uint8)


def _quarter_turns(frame: VideoFrame) -> int:
    """Quarter turns to the left that the file's rotation demands."""
    return round(frame.rotation / 90) % 4


def _seek_frames(
    path: Media, container: InputContainer, stream: VideoStream, first: int, limits: DecodeLimits
) -> Iterator[tuple[int, VideoFrame]]:
    """Numbered frames from the key frame before `first`; ends early when the file's times do not add up."""
    times = _presentation_times(path, container, stream, limits)
    if times is None or first >= len(times):
        return
    try:
        container.seek(int(times[first]), stream=stream)
    except FFmpegError:
        return  # a container without an index; the caller then reads from the start
    for frame in container.decode(stream):
        index = len(times) if frame.pts is None else int(np.searchsorted(times, frame.pts))
        if index == len(times) or times[index] != frame.pts:
            return
        yield index, frame


def _presentation_times(
    path: Media, container: InputContainer, stream: VideoStream, limits: DecodeLimits
) -> NDArray[np.int64] | None:
    """When each frame is shown, in ticks: from the file's index if its steps are even, else from its packets."""
    if container.format.name == "avi":  # keeps no presentation times; what a decoder guesses is off with B-frames
        return None
    if stream.frames and len(stream.index_entries) == stream.frames and stream.start_time is not None:
        entries = list(stream.index_entries)
        steps = np.diff(np.array([entry.timestamp for entry in entries], dtype=np.int64))
        if len(steps) and (steps == steps[0]).all() and not any(entry.is_discard for entry in entries):
            return np.arange(stream.frames, dtype=np.int64) * int(steps[0]) + stream.start_time
    times = _packet_times(path, container, stream, limits)
    return None if None in times else np.sort(np.array(times, dtype=np.int64))


def _packet_times(
    path: Media, container: InputContainer, stream: VideoStream, limits: DecodeLimits
) -> list[int | None]:
    """The times in all packets, nothing decoded; None where the container has none."""
    times: list[int | None] = []
    for packet in container.demux(stream):
        if packet.size:
            times.append(packet.pts)
        if len(times) > limits.max_frames:
            raise ClipError(f"{path}: more than {limits.max_frames} frames; cut it into clips")
    return times


@contextmanager
def open_video(
    path: Media, limits: DecodeLimits = LIMITS, *, header_only: bool = False
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The container and its first real video stream, header checked; every failure inside becomes a ClipError.

    With `header_only` it is opened without a look into its packets, which costs a tenth.
    """
    allowed = VIDEO_FORMATS.get(path.suffix.lower())
    if allowed is None:
        raise ClipError(f"{path}: '{path.suffix}' is no known video extension; known: {', '.join(VIDEO_FORMATS)}")
    options = {"format_whitelist": allowed, "protocol_whitelist": "file"}
    # Opening must not decode: a frame of 16000 x 16000 costs a gigabyte.
    options["skip_frame"] = "all"
    if header_only:
        options |= {"probesize": "32", "analyzeduration": "0", "fpsprobesize": "0"}
    else:
        options["max_pixels"] = str(limits.max_pixels)
    try:
        with (
            _open_file(path) as source,
            av.open(source, "r", options=options, metadata_errors="replace") as container,
        ):
            stream = _find_stream(path, container, limits)
            if not header_only:
                codec = stream.codec_context
                codec.options = {"max_pixels": str(limits.max_pixels)}
                codec.thread_count = 1
                codec.thread_type = "NONE"
            yield container, stream
    except (FFmpegError, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError | FFmpegError) and error.strerror else str(error)
        raise ClipError(
            f"{path}: cannot be read as {path.suffix.lower().lstrip('.')} ({reason}); replace the file or leave it out"
        ) from error


def _open_file(media: Media) -> AbstractContextManager[Any]:
    """What a decoder can open: the name of a file, or a part of a tar as a file."""
    path = media.tar if isinstance(media, Member) else media
    # A pipe or a device would block forever.
    try:
        is_plain, exists = path.is_file(), path.exists()
        num_bytes = path.stat().st_size if is_plain else 0
    except OSError as error:
        raise ClipError(f"{path}: cannot be opened ({error.strerror}); check the manifest") from error
    if not is_plain:
        raise ClipError(f"{path}: {'is not a plain file' if exists else 'no such file'}; check the manifest")
    if not num_bytes:
        raise ClipError(f"{path}: the file is empty; replace it or leave it out")
    return MemberFile(media) if isinstance(media, Member) else nullcontext(str(path.absolute()))


def _find_stream(path: Media, container: InputContainer, limits: DecodeLimits) -> VideoStream:
    """The first stream that is not a cover picture; ClipError for a header that is incomplete or too large."""
    stream = next((one for one in container.streams.video if not one.disposition & Disposition.attached_pic), None)
    if stream is None:
        raise ClipError(f"{path}: no video stream in it; leave it out")
    if stream.codec_context is None:
        raise ClipError(f"{path}: no decoder knows its codec; convert the file or leave it out")
    if not (stream.width and stream.height):
        raise ClipError(f"{path}: no picture size in its header; replace the file or leave it out")
    _refuse_large(path, stream.height, stream.width, limits)
    if stream.frames > limits.max_frames:
        raise ClipError(
            f"{path}: declares {stream.frames} frames, at most {limits.max_frames} are read; cut it into clips"
        )
    seconds = (container.duration or 0) / 1_000_000
    if seconds > limits.max_seconds:
        raise ClipError(f"{path}: lasts {seconds:.0f} s, at most {limits.max_seconds:.0f} are read; cut it into clips")
    return stream


def _refuse_large(path: Media, height: int, width: int, limits: DecodeLimits, what: str = "in its header") -> None:
    if height * width > limits.max_pixels:
        raise ClipError(f"{path}: {width}x{height} pixels {what}, at most {limits.max_pixels} are read; scale it down")


@contextmanager
def _open_image(path: Media, limits: DecodeLimits) -> Iterator[Image.Image]:
    kind = IMAGE_FORMATS.get(path.suffix.lower())
    if kind is None:
        raise ClipError(f"{path}: '{path.suffix}' is no known image extension; known: {', '.join(IMAGE_FORMATS)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with _open_file(path) as source, Image.open(source, formats=[kind]) as image:
                _refuse_large(path, image.height, image.width, limits)
                yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ClipError(f"{path}: cannot be read as {kind} ({error}); replace the file or leave it out") from error


def probe_image(path: Media, *, limits: DecodeLimits = LIMITS) -> MediaFacts:
    """Facts from the header; nothing is decoded."""
    with _open_image(path, limits) as image:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        rotation = {3: 180, 5: -90, 6: -90, 7: 90, 8: 90}.get(orientation, 0)
        height, width = (image.width, image.height) if rotation in (90, -90) else (image.height, image.width)
        return MediaFacts("image", height, width, 1, None, str(image.format).lower(), rotation)


def read_image(
    path: Media, *, height: int, width: int, limits: DecodeLimits = LIMITS, crop_rule: CropRule | None = None
) -> Tensor:
    """An image as a clip of one frame, bicubic with antialiasing, scaled and cut as a clip is: uint8 [C, 1, H, W]."""
    with _open_image(path, limits) as image:
        is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
        size = (image.width, image.height) if is_turned else (image.height, image.width)
        crop = (crop_rule or cover_rule(height, width))(*size)
        check_crop(path, crop, height, width, limits)
        if image.format == "JPEG":
            # Its decoder can leave out fine detail; twice the size needed leaves the final scaling enough to average.
            stored = (crop.height, crop.width) if is_turned else (crop.width, crop.height)
            image.draft(image.mode, (2 * stored[0], 2 * stored[1]))
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16 bits per pixel; Pillow's own conversion would turn nearly all of it white
            upright = Image.fromarray((np.asarray(upright).astype(np.uint32) >> 8).astype(np.uint8))
        scaled = upright.convert("RGB").resize((crop.width, crop.height), Image.Resampling.BICUBIC)
        box = (crop.left, crop.top, crop.left + width, crop.top + height)
        pixels_HWC = torch.from_numpy(np.array(scaled.crop(box), dtype=np.uint8))
    return pixels_HWC.permute(2, 0, 1)[:, None].contiguous()
