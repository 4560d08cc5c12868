"""Samples and their files: mp4, webm, gif or png, each with the request, settings and model that it was made from.

Shape letters: C channels, F frames, H height, W width.
"""

from __future__ import annotations

import base64
import html
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from frameloom.config.schema.sampling import MEDIA, SampleRequest, SampleSection
from frameloom.core.errors import DataError
from frameloom.core.files import atomic_folder, digest_file
from frameloom.core.paths import clean_name
from frameloom.data.media.decode import probe_clip, read_clip
from frameloom.data.media.writing import (
    CONTACT_SHEET,
    contact_sheet,
    read_metadata,
    write_gif,
    write_image,
    write_video,
    write_webm,
)

# Names of fields in the metadata of files, where they differ.
_STORED = {"image": "head", "last_image": "tail"}
STORED_MEDIA = {name: _STORED.get(name, name) for name in MEDIA}
# Locations and versions, which say nothing about the content.
ASIDE = ("model", "overrides", "version", *STORED_MEDIA.values())
FIRST_FRAME = "00000.png"
_SUFFIXES = (".mp4", ".webm", ".gif", ".png")


@dataclass(frozen=True)
class Sample:
    """A video or picture: `frames` in RGB (FHWC), the complete request and the words for the model that made it.

    In a notebook it shows itself.
    """

    frames: NDArray[np.uint8]
    request: SampleRequest
    model: Mapping[str, str]

    def save(self, path: str | Path) -> Path:
        """Write a .mp4, .webm, .gif or .png file with its metadata; without a suffix, a folder of png frames."""
        path = Path(path)
        kind = path.suffix.lower() or ("folder" if len(self.frames) > 1 else "none")
        if kind not in (*_SUFFIXES, "folder"):
            raise DataError(f"{path}: the suffix names no format; choose {', '.join(_SUFFIXES)}")
        if kind == ".png" and len(self.frames) > 1:
            raise DataError(
                f"{path}: {len(self.frames)} frames are more than one picture; name a .mp4, .webm or .gif file, or a "
                "folder without suffix for png frames"
            )
        about = describe_sample(self.model, self.request)
        if len(self.frames) > 1:
            about["sample.format"] = "png" if kind == "folder" else kind[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_frames(path, self.frames, self.request.fps, about)
        return path

    def _repr_html_(self) -> str:
        """The picture or video inline, for notebooks."""
        is_picture = len(self.frames) == 1
        with tempfile.TemporaryDirectory() as folder:
            path = self.save(Path(folder, "sample.png" if is_picture else "sample.mp4"))
            data = base64.b64encode(path.read_bytes()).decode("ascii")
        words = html.escape(f"{self.request.prompt} (seed {self.request.seed})")
        if is_picture:
            return f'<img src="data:image/png;base64,{data}" alt="{words}">'
        return (
            f'<video src="data:video/mp4;base64,{data}" autoplay loop muted playsinline controls '
            f'aria-label="{words}"></video>'
        )


def describe_sample(model: Mapping[str, str], request: SampleRequest) -> dict[str, str]:
    """Everything that a file is made from: model, prompt, seed, settings, and given files with their digests.

    The name is among it if one was given: the same video under two names is two files.
    """
    about = {"prompt": request.prompt, "seed": str(request.seed)}
    if request.name is not None:
        about["name"] = request.name
    for name, stored in STORED_MEDIA.items():
        path: Path | None = getattr(request, name)
        if path is not None:
            about |= {stored: str(path), f"{stored}.sha256": digest_file(path)}
    for name, value in request.model_dump(mode="json", include=set(SampleSection.model_fields)).items():
        about[f"sample.{name}"] = value if isinstance(value, str) else json.dumps(value)
    return about | dict(model)


def free_path(out: Path, request: SampleRequest, taken: frozenset[str] = frozenset()) -> Path:
    """The first name that no file has and that is not `taken`; a clip of png frames gets a folder.

    `clean_name` has left nothing in it that could leave the folder.
    """
    stem, again = clean_name(request.name or request.prompt) + f"-seed{request.seed}", 2
    ending = ".png" if request.frames == 1 else "" if request.format == "png" else f".{request.format}"
    name = f"{stem}{ending}"
    while name in taken or (out / name).exists():
        name, again = f"{stem}-{again}{ending}", again + 1
    return out / name


def write_samples(samples: Sequence[Sample], out: Path) -> list[Path]:
    """One file per sample, none overwritten, and the contact sheet of this call."""
    paths = [sample.save(free_path(out, sample.request)) for sample in samples]
    write_sheet([(sample.request, sample.frames) for sample in samples], out)
    return paths


def write_sheet(clips: Sequence[tuple[SampleRequest, NDArray[np.uint8]]], out: Path) -> None:
    labels = [f"{request.prompt} (seed {request.seed})" for request, _ in clips]
    write_image(out / CONTACT_SHEET, contact_sheet([list(frames) for _, frames in clips], labels))


def write_frames(path: Path, frames_FHWC: NDArray[np.uint8], fps: float, about: Mapping[str, str]) -> None:
    """In the format of the suffix; without one, a folder of png files."""
    match path.suffix.lower():
        case ".png":
            write_image(path, frames_FHWC[0], metadata=about)
        case ".gif":
            write_gif(path, frames_FHWC, fps, metadata=about)
        case ".webm":
            write_webm(path, frames_FHWC, fps, metadata=about)
        case ".mp4":
            write_video(path, frames_FHWC, fps, metadata=about)
        case _:
            with atomic_folder(path) as temporary:
                for number, frame_HWC in enumerate(frames_FHWC):
                    write_image(temporary / f"{number:05d}.png", frame_HWC, metadata=None if number else about)


def read_about(path: Path) -> dict[str, str]:
    """What a sample was saved with; DataError for a file that does not say how it was made."""
    if path.is_dir():
        path = path / FIRST_FRAME
    if not path.is_file():
        raise DataError(f"{path}: no such file; name a file, or a folder of frames, that `frameloom sample` wrote")
    about = read_metadata(path)
    if "prompt" not in about or "seed" not in about:
        raise DataError(f"{path}: does not say how it was made; name a file that `frameloom sample` wrote, unchanged")
    return about


def read_request(about: Mapping[str, str], *, where: str) -> SampleRequest:
    """The request in a file's metadata; settings that a file is older than have their defaults."""
    found: dict[str, Any] = {name: about[name] for name in ("prompt", "seed", "name") if name in about}
    found |= {name: about[stored] for name, stored in STORED_MEDIA.items() if stored in about}
    for name, field in SampleSection.model_fields.items():
        if (text := about.get(f"sample.{name}")) is not None:
            # Text is stored as it stands, all else as JSON; only where null is possible, text that is no JSON is text.
            try:
                found[name] = text if isinstance(field.default, str) else json.loads(text)
            except ValueError:
                found[name] = text
    try:
        return SampleRequest.model_validate(found)
    except ValidationError as error:
        raise DataError(f"{where}: its settings are not known here ({error.errors()[0]['msg']})") from error


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
