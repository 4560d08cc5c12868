"""Writing media files: mp4 (H.264), webm (VP9), gif and PNG, each with metadata, and contact sheets.

Arrays are uint8 RGB. Shape letters: F frames, H height, W width, C channels (3).
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
from av.error import FFmpegError
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from frameloom.core.device import has_avx512
from frameloom.core.errors import DataError
from frameloom.core.files import atomic_file
from frameloom.data.media.decode import VIDEO_FORMATS

Pixels = NDArray[np.uint8]

# The one tag that every mp4 reader keeps; it holds our metadata as JSON, so keys need no agreement with the container.
_METADATA_KEY = "comment"
_UP_TO_AVX2 = "MMX2,SSE2Fast,SSSE3,SSE4.2,AVX,FMA3,BMI2,AVX2"
_MAX_FPS_DENOMINATOR = 1001  # 24000/1001 and friends stay exact


def write_video(
    path: Path,
    frames_FHWC: Pixels,
    fps: float | Fraction,
    *,
    metadata: Mapping[str, str] | None = None,
    crf: float = 14,
    preset: str = "medium",
) -> None:
    """Write an H.264 mp4 (yuv420p, BT.709, index first); the same frames and settings give the same bytes."""
    _check_frames(path, frames_FHWC)
    rate = Fraction(fps).limit_denominator(_MAX_FPS_DENOMINATOR)
    if rate <= 0:
        raise DataError(f"{path}: a frame rate of {float(fps):g} cannot be written; give a number above 0")
    with (
        atomic_file(path) as temporary,
        av.open(
            str(temporary.absolute()), "w", format="mp4", options={"movflags": "+faststart+use_metadata_tags"}
        ) as container,
    ):
        if metadata is not None:
            container.metadata[_METADATA_KEY] = _pack_metadata(metadata)
        # x264's code for AVX-512 gives other bytes from run to run (a third of small clips); that for AVX2 does not.
        steady = {"x264-params": f"asm={_UP_TO_AVX2}"} if has_avx512() else {}
        video = container.add_stream("libx264", rate=rate, options={"crf": f"{crf:g}", "preset": preset, **steady})
        codec = video.codec_context
        _, codec.height, codec.width, _ = frames_FHWC.shape
        codec.pix_fmt = "yuv420p"
        # x264 cuts a frame by its number of threads, so the bytes would depend on the machine.
        codec.thread_count = 1
        codec.colorspace = Colorspace.ITU709
        codec.color_primaries = ColorPrimaries.BT709
        codec.color_trc = ColorTrc.BT709
        codec.color_range = ColorRange.MPEG
        for frame_HWC in frames_FHWC:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_HWC), format="rgb24")
            frame = frame.reformat(
                format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG, threads=1
            )
            container.mux(video.encode(frame))
        container.mux(video.encode())


def _check_frames(path: Path, frames_FHWC: Pixels) -> None:
    if frames_FHWC.dtype != np.uint8 or frames_FHWC.ndim != 4 or frames_FHWC.shape[-1] != 3:
        raise ValueError(f"expected uint8 frames of shape FHW3, got {frames_FHWC.dtype} {frames_FHWC.shape}")
    num_frames, height_px, width_px, _ = frames_FHWC.shape
    if num_frames == 0:
        raise DataError(f"{path}: no frames to write; a video needs at least one")
    if height_px % 2 or width_px % 2 or not height_px * width_px:
        raise DataError(
            f"{path}: {width_px}x{height_px} pixels; an H.264 video needs an even width and height, "
            "crop or resize the frames by a pixel"
        )


def write_image(path: Path, frame_HWC: Pixels, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write an RGB PNG; the same pixels and metadata give the same bytes."""
    if frame_HWC.dtype != np.uint8 or frame_HWC.ndim != 3 or frame_HWC.shape[-1] != 3:
        raise ValueError(f"expected a uint8 frame of shape HW3, got {frame_HWC.dtype} {frame_HWC.shape}")
    text = PngImagePlugin.PngInfo()
    if metadata is not None:
        text.add_text(_METADATA_KEY, _pack_metadata(metadata))
    with atomic_file(path) as temporary:
        Image.fromarray(np.ascontiguousarray(frame_HWC)).save(temporary, format="PNG", pnginfo=text)


def write_gif(
    target: Path | BinaryIO, frames_FHWC: Pixels, fps: float, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write an endless gif to a path or an open file."""
    # Without dithering, so that still parts of a clip stay still.
    pictures = [
        Image.fromarray(np.ascontiguousarray(frame)).quantize(256, dither=Image.Dither.NONE) for frame in frames_FHWC
    ]
    # Hundredths of a second are all that a gif knows; two is the least that players keep to.
    duration_ms = max(20, round(100 / fps) * 10)
    note = {} if metadata is None else {"comment": _pack_metadata(metadata).encode()}
    with nullcontext(target) if not isinstance(target, Path) else atomic_file(target) as file:
        first, *rest = pictures
        first.save(file, format="GIF", save_all=True, append_images=rest, duration=duration_ms, loop=0, **note)


def write_webm(
    path: Path, frames_FHWC: Pixels, fps: float | Fraction, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a VP9 webm on one thread: the bytes must not depend on the machine."""
    # The bit-exact flag leaves out the random number that a container of this kind would be marked with.
    options = {"fflags": "+bitexact"}
    with (
        atomic_file(path) as temporary,
        av.open(str(temporary.absolute()), "w", format="webm", options=options) as container,
    ):
        if metadata is not None:
            container.metadata[_METADATA_KEY] = _pack_metadata(metadata)
        rate = Fraction(fps).limit_denominator(_MAX_FPS_DENOMINATOR)
        video = container.add_stream("libvpx-vp9", rate=rate, options={"crf": "18", "b": "0", "row-mt": "0"})
        codec = video.codec_context
        _, codec.height, codec.width, _ = frames_FHWC.shape
        codec.pix_fmt, codec.thread_count = "yuv420p", 1
        for frame_HWC in frames_FHWC:
            container.mux(video.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_HWC), format="rgb24")))
        container.mux(video.encode())


def _pack_metadata(metadata: Mapping[str, str]) -> str:
    return json.dumps(dict(metadata), sort_keys=True)


def read_metadata(path: Path) -> dict[str, str]:
    """What a writer of this module was given; empty for a file without our metadata."""
    suffix = path.suffix.lower()
    kind = {".png": "PNG", ".gif": "gif", ".webm": "webm"}.get(suffix, "mp4")
    try:
        if suffix in (".png", ".gif"):
            with Image.open(path, formats=[kind.upper()]) as image:
                comment = image.info.get(_METADATA_KEY, "")
                packed = comment.decode() if isinstance(comment, bytes) else str(comment)
        else:
            # Without an allow-list a text file named .mp4 could be a playlist that opens other files.
            options = {"format_whitelist": VIDEO_FORMATS[f".{kind}"], "protocol_whitelist": "file"}
            with av.open(str(path.absolute()), options=options) as container:
                tags = {key.lower(): text for key, text in container.metadata.items()}
                packed = tags.get(_METADATA_KEY, "")
    except (OSError, SyntaxError, UnicodeDecodeError, Image.DecompressionBombError, FFmpegError) as error:
        reason = error.strerror if isinstance(error, FFmpegError) else error
        raise DataError(f"{path}: not a readable {kind} ({reason}); write it again or remove it") from error
    try:
        value = json.loads(packed)
    except ValueError:
        return {}
    return {key: text for key, text in value.items() if isinstance(text, str)} if isinstance(value, dict) else {}


_MARGIN_RGB = (24, 24, 27)
_OUTLINE_RGB = (63, 63, 70)
_LABEL_RGB = (228, 228, 231)
_PAD_PX = 16
_GAP_PX = 4
_LABEL_PX = 15
_LABEL_LINE_PX = 24
_MIN_LABEL_PX = 480  # a single image is narrow; its caption may run past it this far


# What `frameloom sample` and training put beside their samples to show them all at once: a picture, but no clip.
CONTACT_SHEET = "contact-sheet.png"


def contact_sheet(
    rows: Sequence[Sequence[Pixels]],
    labels: Sequence[str],
    *,
    frame_height_px: int = 96,
    max_frames: int = 9,
    num_columns: int = 1,
) -> Pixels:
    """One picture of many clips: each row is a clip's frames (evenly picked when long) under its label.

    Rows fill `num_columns` columns from top to bottom. Frames of every size come out `frame_height_px` tall.
    """
    if not rows or len(rows) != len(labels) or not all(len(row) for row in rows):
        raise ValueError(f"need one label per row and no empty row, got {len(rows)} rows and {len(labels)} labels")
    strips = [
        _draw_strip(
            [row[int(i)] for i in np.linspace(0, len(row) - 1, min(len(row), max_frames)).round()],
            label,
            frame_height_px,
        )
        for row, label in zip(rows, labels, strict=True)
    ]
    per_column = -(-len(strips) // num_columns)
    width = max(strip.width for strip in strips) + 2 * _PAD_PX
    height = strips[0].height + _PAD_PX
    sheet = Image.new("RGB", (width * -(-len(strips) // per_column), height * per_column + _PAD_PX), _MARGIN_RGB)
    for i, strip in enumerate(strips):
        sheet.paste(strip, (i // per_column * width + _PAD_PX, i % per_column * height + _PAD_PX))
    return np.asarray(sheet)


def _draw_strip(frames: Sequence[Pixels], label: str, frame_height_px: int) -> Image.Image:
    """A label line above the frames, each with a thin outline so that a black frame does not melt into the margin."""
    images = [Image.fromarray(np.ascontiguousarray(frame)) for frame in frames]
    images = [
        image.resize(
            (max(1, round(image.width * frame_height_px / image.height)), frame_height_px), Image.Resampling.BICUBIC
        )
        for image in images
    ]
    font = ImageFont.load_default(size=_LABEL_PX)
    width = sum(image.width + 2 + _GAP_PX for image in images) - _GAP_PX
    text, max_px = " ".join(label.split()), max(width, _MIN_LABEL_PX)
    if font.getlength(text) > max_px:
        kept = bisect.bisect_right(
            range(len(text)), max_px, key=lambda length: math.ceil(font.getlength(text[:length] + "..."))
        )
        text = text[: max(kept - 1, 0)].rstrip() + "..."
    strip = Image.new(
        "RGB", (max(width, int(font.getlength(text)) + 1), _LABEL_LINE_PX + frame_height_px + 2), _MARGIN_RGB
    )
    draw = ImageDraw.Draw(strip)
    draw.text((0, 0), text, fill=_LABEL_RGB, font=font)
    left = 0
    for image in images:
        draw.rectangle(
            (left, _LABEL_LINE_PX, left + image.width + 1, _LABEL_LINE_PX + image.height + 1), outline=_OUTLINE_RGB
        )
        strip.paste(image, (left + 1, _LABEL_LINE_PX + 1))
        left += image.width + 2 + _GAP_PX
    return strip
