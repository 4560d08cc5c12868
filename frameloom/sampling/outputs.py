"""Sampled videos as files: mp4, webm, gif or png, each with the request and settings it was made from.

Shape letters: C channels, F frames, H height, W width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.error import FFmpegError
from numpy.typing import NDArray
from PIL import Image

from frameloom.config.schema.sampling import SampleSection
from frameloom.core.errors import DataError
from frameloom.core.files import atomic_file, atomic_folder, digest_file
from frameloom.core.paths import clean_name
from frameloom.data.media.decode import probe_clip, read_clip
from frameloom.data.media.writing import read_metadata, write_image, write_video
from frameloom.sampling.request import MEDIA, Request

# What says where files lie, not what is in them.
PLACES = ("model", "overrides", *MEDIA)
ABOUT = "comment"
FIRST_FRAME = "00000.png"


def describe_result(origin: Mapping[str, str], request: Request, settings: SampleSection) -> dict[str, str]:
    """Everything that a file is made from: model, prompt, seed, settings, and given files with their digests.

    The name is among it if one was given: the same video under two names is two files.
    """
    about = {"prompt": request.prompt, "seed": str(request.seed)}
    if request.name is not None:
        about["name"] = request.name
    for name in MEDIA:
        path: Path | None = getattr(request, name)
        if path is not None:
            about |= {name: str(path), f"{name}.sha256": digest_file(path)}
    for name, value in settings.model_dump(mode="json").items():
        about[f"sample.{name}"] = value if isinstance(value, str) else json.dumps(value)
    return about | dict(origin)


def name_clip(request: Request) -> str:
    """A file name without suffix; `clean_name` has left nothing that could leave a folder."""
    return clean_name(request.name or request.prompt) + f"-seed{request.seed}"


def free_path(out: Path, request: Request, suffix: str, taken: frozenset[str] = frozenset()) -> Path:
    """The first name that no file has and that is not `taken`; frames of a png clip get a folder."""
    stem, again = name_clip(request), 2
    frames = request.settings.frames if request.settings else None
    ending = "" if suffix == "png" and frames not in (None, 1) else f".{suffix}"
    name = f"{stem}{ending}"
    while name in taken or (out / name).exists():
        name, again = f"{stem}-{again}{ending}", again + 1
    return out / name


def write_clip(path: Path, frames_FHWC: NDArray[np.uint8], settings: SampleSection, about: Mapping[str, str]) -> None:
    """Write one result; a single frame is a png file, several in format png are a folder of them."""
    if len(frames_FHWC) == 1:
        write_image(path, frames_FHWC[0], metadata=about)
    elif settings.format == "png":
        with atomic_folder(path) as temporary:
            for number, frame_HWC in enumerate(frames_FHWC):
                write_image(temporary / f"{number:05d}.png", frame_HWC, metadata=None if number else about)
    elif settings.format == "gif":
        _write_gif(path, frames_FHWC, settings.fps, about)
    elif settings.format == "webm":
        _write_webm(path, frames_FHWC, settings.fps, about)
    else:
        write_video(path, frames_FHWC, settings.fps, metadata=about)


def _write_gif(path: Path, frames_FHWC: NDArray[np.uint8], fps: float, about: Mapping[str, str]) -> None:
    # Without dithering, so that still parts of a clip stay still.
    pictures = [
        Image.fromarray(np.ascontiguousarray(frame)).quantize(256, dither=Image.Dither.NONE) for frame in frames_FHWC
    ]
    # Hundredths of a second are all that a gif knows; two is the least that players keep to.
    duration_ms = max(20, round(100 / fps) * 10)
    with atomic_file(path) as temporary:
        pictures[0].save(
            temporary,
            format="GIF",
            save_all=True,
            append_images=pictures[1:],
            duration=duration_ms,
            loop=0,
            comment=_pack(about),
        )


def _write_webm(path: Path, frames_FHWC: NDArray[np.uint8], fps: float, about: Mapping[str, str]) -> None:
    """VP9 on one thread: the bytes must not depend on the machine."""
    # The bit-exact flag leaves out the random number that a container of this kind would be marked with.
    options = {"fflags": "+bitexact"}
    with (
        atomic_file(path) as temporary,
        av.open(str(temporary.absolute()), "w", format="webm", options=options) as container,
    ):
        container.metadata[ABOUT] = _pack(about).decode()
        rate = Fraction(fps).limit_denominator(1001)
        video = container.add_stream("libvpx-vp9", rate=rate, options={"crf": "18", "b": "0", "row-mt": "0"})
        codec = video.codec_context
        _, codec.height, codec.width, _ = frames_FHWC.shape
        codec.pix_fmt, codec.thread_count = "yuv420p", 1
        for frame_HWC in frames_FHWC:
            container.mux(video.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_HWC), format="rgb24")))
        container.mux(video.encode())


def _pack(about: Mapping[str, str]) -> bytes:
    return json.dumps(dict(about), sort_keys=True).encode()


def read_about(path: Path) -> dict[str, str]:
    """What `write_clip` was told; DataError for a file that does not say how it was made."""
    if path.is_dir():
        path = path / FIRST_FRAME
    if not path.is_file():
        raise DataError(f"{path}: no such file; name a file, or a folder of frames, that `frameloom sample` wrote")
    suffix = path.suffix.lower()
    if suffix in (".gif", ".webm"):
        about = _unpack(_read_gif(path) if suffix == ".gif" else _read_webm(path))
    else:
        about = read_metadata(path)
    if "prompt" not in about or "seed" not in about:
        raise DataError(f"{path}: does not say how it was made; name a file that `frameloom sample` wrote, unchanged")
    return about


def _unpack(packed: str) -> dict[str, str]:
    try:
        value = json.loads(packed)
    except ValueError:
        return {}
    return {key: text for key, text in value.items() if isinstance(text, str)} if isinstance(value, dict) else {}


def _read_gif(path: Path) -> str:
    try:
        with Image.open(path, formats=["GIF"]) as image:
            comment: Any = image.info.get(ABOUT, b"")
            return comment.decode() if isinstance(comment, bytes) else str(comment)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable gif ({error}); make it again") from error


def _read_webm(path: Path) -> str:
    options = {"format_whitelist": "matroska,webm", "protocol_whitelist": "file"}
    try:
        with av.open(str(path.absolute()), options=options) as container:
            tags = {key.lower(): value for key, value in container.metadata.items()}
            return tags.get(ABOUT, "")
    except FFmpegError as error:
        raise DataError(f"{path}: not a readable webm ({error.strerror}); make it again") from error


def read_frames(path: Path) -> NDArray[np.uint8]:
    """All frames of a written result, FHWC."""
    if path.is_dir():
        return np.concatenate([read_frames(file) for file in sorted(path.glob("*.png"))])
    suffix = path.suffix.lower()
    if suffix in (".png", ".gif"):
        with Image.open(path, formats=["PNG", "GIF"]) as image:
            pictures = []
            for number in range(getattr(image, "n_frames", 1)):
                image.seek(number)
                pictures.append(np.asarray(image.convert("RGB")))
            return np.stack(pictures)
    facts = probe_clip(path)
    pixels_CFHW = read_clip(path, indices=range(facts.frames), height=facts.height, width=facts.width)
    return pixels_CFHW.permute(1, 2, 3, 0).contiguous().numpy()
