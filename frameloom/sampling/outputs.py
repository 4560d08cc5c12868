"""Sampled videos as files: mp4, webm, gif or png, each with the request and settings it was made from.

Shape letters: C channels, F frames, H height, W width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from frameloom.config.schema.sampling import SampleSection
from frameloom.core.errors import DataError
from frameloom.core.files import atomic_folder, digest_file
from frameloom.core.paths import clean_name
from frameloom.data.media.decode import probe_clip, read_clip
from frameloom.data.media.writing import read_metadata, write_gif, write_image, write_video, write_webm
from frameloom.sampling.request import MEDIA, Request

# What says where files lie, not what is in them.
PLACES = ("model", "overrides", *MEDIA)
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
        write_gif(path, frames_FHWC, settings.fps, metadata=about)
    elif settings.format == "webm":
        write_webm(path, frames_FHWC, settings.fps, metadata=about)
    else:
        write_video(path, frames_FHWC, settings.fps, metadata=about)


def read_about(path: Path) -> dict[str, str]:
    """What `write_clip` was told; DataError for a file that does not say how it was made."""
    if path.is_dir():
        path = path / FIRST_FRAME
    if not path.is_file():
        raise DataError(f"{path}: no such file; name a file, or a folder of frames, that `frameloom sample` wrote")
    about = read_metadata(path)
    if "prompt" not in about or "seed" not in about:
        raise DataError(f"{path}: does not say how it was made; name a file that `frameloom sample` wrote, unchanged")
    return about


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
