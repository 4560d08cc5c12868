"""Probing of media headers: kind, size, frames, frame rate and rotation of a file, without decoding it.

Sizes are as the decoder shows them, after rotation; frames are those that it will give, so packets that an edit list
hides are not counted, and a file whose table points behind its end is refused as cut off.
"""

from __future__ import annotations

import io
import math
from fractions import Fraction

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.video.stream import VideoStream
from numpy.typing import NDArray

from frameloom.data.media.decode import (
    IMAGE_FORMATS,
    LIMITS,
    VIDEO_FORMATS,
    ClipError,
    DecodeLimits,
    Media,
    MediaFacts,
    kind_of,
    open_video,
    probe_clip,
    probe_image,
)
from frameloom.data.media.tar_members import count_bytes, open_bytes

_ADVICE = "replace the file or leave it out"
_MOV, _AVI = "mov,mp4,m4a,3gp,3g2,mj2", "avi"
# Muxers that can write a track header for most codecs, tried in turn by `_read_rotation`.
_MATRIX_MUXERS = ("mp4", "mov")
_MAX_BOXES = 4096
_SNIFF_BYTES = 4096


def probe_header(path: Media, *, limits: DecodeLimits = LIMITS) -> MediaFacts:
    """The facts of a video or an image, distinguished by the extension; ClipError names the defect."""
    kind = kind_of(path)
    if kind is None:
        known = ", ".join([*VIDEO_FORMATS, *IMAGE_FORMATS])
        raise ClipError(f"{path}: '{path.suffix}' is no known media extension; known: {known}")
    if kind == "video":
        return _probe_video(path, limits)
    facts = probe_image(path, limits=limits)
    if _is_cut_image(path, facts.codec):
        raise ClipError(f"{path}: the file is cut off before its end; {_ADVICE}")
    return facts


def _probe_video(path: Media, limits: DecodeLimits) -> MediaFacts:
    with open_video(path, limits, header_only=True) as (container, stream):
        num_frames, times = _count_frames(path, container, stream, limits)
        is_variable = _has_uneven_steps(times)
        if is_variable and container.format.name == _MOV:
            # Its table has the times of decoding, whose mean step is off when B-frames come late.
            _, times = _count_packets(path, container, stream, limits)
        rate = stream.average_rate or stream.guessed_rate
        if not num_frames:
            raise ClipError(f"{path}: no frame in it; leave it out")
        if not rate:
            raise ClipError(f"{path}: no frame rate in its header; convert the file or leave it out")
        fps = float(rate)
        if is_variable:
            assert stream.time_base is not None
            fps = float((len(times) - 1) / (Fraction(int(times[-1] - times[0])) * stream.time_base))
        rotation = _read_rotation(path, stream)
        height, width = stream.height, stream.width
        if round(rotation / 90) % 2:
            height, width = width, height
        codec = stream.codec_context.name
        return MediaFacts("video", height, width, num_frames, fps, codec, rotation, is_variable)


def _count_frames(
    path: Media, container: InputContainer, stream: VideoStream, limits: DecodeLimits
) -> tuple[int, NDArray[np.int64]]:
    """How many frames the decoder will show, and the rising times of all packets in ticks; from the table if it can."""
    entries = list(stream.index_entries)
    is_mov = container.format.name == _MOV
    is_whole = len(entries) == stream.frames and (is_mov or container.format.name == _AVI)
    if (is_mov and _has_fragments(path)) or not is_whole:
        return _count_packets(path, container, stream, limits)
    num_bytes = count_bytes(path)
    num_cut = sum(entry.pos + entry.size > num_bytes for entry in entries)
    if num_cut:
        raise ClipError(
            f"{path}: cut off: {num_cut} of {len(entries)} frames lie behind the end of the file; {_ADVICE}"
        )
    # An edit list hides some packets; an empty AVI chunk stands for a dropped frame, which no decoder shows.
    num_shown = sum(bool(entry.size) and not entry.is_discard for entry in entries)
    return num_shown, np.array([entry.timestamp for entry in entries], dtype=np.int64)


def _count_packets(
    path: Media, container: InputContainer, stream: VideoStream, limits: DecodeLimits
) -> tuple[int, NDArray[np.int64]]:
    num_shown = 0
    times: list[int] = []
    for packet in container.demux(stream):
        if not packet.size or packet.is_corrupt:
            continue
        num_shown += not packet.is_discard
        when = packet.pts if packet.pts is not None else packet.dts
        times.append(len(times) if when is None else when)
        if len(times) > limits.max_frames:
            raise ClipError(f"{path}: more than {limits.max_frames} frames; cut it into clips")
    return num_shown, np.sort(np.array(times, dtype=np.int64))


def _has_uneven_steps(times: NDArray[np.int64]) -> bool:
    """More than rounding to ticks explains: 29.97 frames a second in milliseconds alternate between 33 and 34."""
    if len(times) < 3:
        return False
    steps = np.diff(times)
    return bool(steps.max() - steps.min() > max(1.0, 0.02 * float(steps.mean())))


def _read_rotation(path: Media, stream: VideoStream) -> int:
    """Display rotation in degrees, counter-clockwise.

    The library shows the matrix on decoded frames only; but it copies it into the header of another file, so an empty
    file in memory shows it for every container alike. A codec that neither muxer takes is decoded for one frame.
    """
    if stream.container.format.name == _AVI:  # has no place for it
        return 0
    for name in _MATRIX_MUXERS:
        buffer = io.BytesIO()
        try:
            with av.open(buffer, "w", format=name, options={"movflags": "empty_moov"}) as copy:
                copy.add_stream_from_template(stream)
                copy.start_encoding()
        except (FFmpegError, ValueError):
            continue
        header = buffer.getvalue()
        # The matrix of the first track, as FFmpeg reads it from its first two columns.
        a, b, _, c, d = (int(one) for one in np.frombuffer(header, ">i4", count=5, offset=header.index(b"tkhd") + 44))
        scale_x, scale_y = math.hypot(a, c), math.hypot(b, d)
        # Sign and rounding are those of `VideoFrame.rotation`: to the left is positive, fractions are dropped.
        return int(-math.degrees(math.atan2(b / scale_y, a / scale_x))) if scale_x and scale_y else 0
    return probe_clip(path).rotation


def _has_fragments(path: Media) -> bool:
    """Whether an mp4 goes on in `moof` boxes, which its table does not list; ClipError when the last box is cut off."""
    has_fragments, start = False, 0
    with open_bytes(path) as file:
        end = file.seek(0, io.SEEK_END)
        for _ in range(_MAX_BOXES):
            file.seek(start)
            head = file.read(16)
            if len(head) < 8:
                break
            size = int.from_bytes(head[:4], "big")
            if size == 1 and len(head) == 16:
                size = int.from_bytes(head[8:], "big")
            size = size or end - start  # 0 means: up to the end of the file
            has_fragments |= head[4:8] == b"moof"
            if has_fragments and start + size > end:
                raise ClipError(f"{path}: cut off in the middle of a fragment; {_ADVICE}")
            if size < 8 or start + size >= end:
                break
            start += size
    return has_fragments


def _is_cut_image(path: Media, codec: str) -> bool:
    """Whether the end is missing, where the format tells; a JPEG does not, and is left to decoding."""
    with open_bytes(path) as file:
        if codec == "webp":
            return int.from_bytes(file.read(8)[4:], "little") + 8 > count_bytes(path)
        if codec != "png":
            return False
        end, start = file.seek(0, io.SEEK_END), 8
        while start + 12 <= end:
            file.seek(start)
            head = file.read(8)
            start += 12 + int.from_bytes(head[:4], "big")
            if head[4:] == b"IEND":
                return start > end
        return True


_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "png"),
    (0, b"\xff\xd8\xff", "jpeg"),
    (0, b"GIF8", "gif"),
    (0, b"BM", "bmp"),
    (0, b"II*\0", "tiff"),
    (0, b"MM\0*", "tiff"),
    (8, b"WEBP", "webp"),
    (8, b"AVI ", "avi"),
    (8, b"WAVE", "wav"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
    *((4, kind, "mp4") for kind in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
    (0, b"FLV\x01", "flv"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (0, b"\0\0\x01\xba", "mpeg"),
    (0, b"%PDF", "pdf"),
    (0, b"PK\x03\x04", "zip"),
    (0, b"\x1f\x8b", "gzip"),
)
_CONTENT_OF = {_MOV: "mp4", "matroska,webm": "matroska", _AVI: "avi", "PNG": "png", "JPEG": "jpeg", "WEBP": "webp"}


def sniff_content(path: Media) -> str | None:
    """What the first bytes say the file is ("mp4", "png", "text" …); None when they say nothing."""
    with open_bytes(path) as file:
        head = file.read(_SNIFF_BYTES)
    for start, mark, name in _SIGNATURES:
        if head[start : start + len(mark)] == mark:
            return name
    is_text = bool(head) and not any(byte < 9 or 13 < byte < 32 for byte in head)
    return "text" if is_text else None


def expected_content(path: Media) -> str | None:
    """What `sniff_content` should say of a file with this extension; None for an unknown one."""
    suffix = path.suffix.lower()
    return _CONTENT_OF.get(VIDEO_FORMATS.get(suffix) or IMAGE_FORMATS.get(suffix) or "")
