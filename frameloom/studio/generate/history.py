"""Earlier results, read from the files of the output folder and the settings that these carry."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from frameloom.core.errors import DataError
from frameloom.core.files import digest_file
from frameloom.studio.generate.requests import FORMATS, UPLOADS, Wish
from frameloom.studio.runs.samples import CLIPS

_SUFFIXES = (".mp4", ".webm", ".gif", ".png")
_CONTACT_SHEET = "contact-sheet.png"
_MAX_SHOWN = 200
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Made:
    """A finished file and what it says of itself."""

    path: Path
    about: dict[str, str]

    @property
    def is_clip(self) -> bool:
        return self.path.suffix.lower() in CLIPS

    @property
    def prompt(self) -> str:
        return self.about["prompt"]

    def describe(self) -> str:
        """One line of the settings that matter most."""
        about = self.about
        size = f"{about.get('sample.width', '?')}x{about.get('sample.height', '?')}"
        frames = about.get("sample.frames", "1")
        length = "1 frame" if frames == "1" else f"{frames} frames at {_plain(about.get('sample.fps', '?'))} fps"
        steps = f"{about.get('sample.steps', '?')} steps, guidance {_plain(about.get('sample.guidance', '?'))}"
        return f"seed {about['seed']} · {steps} · {size} · {length} · {self.model}"

    @property
    def model(self) -> str:
        step = self.about.get("step")
        return self.about.get("model", self.about.get("run", "?")) + (f" at step {step}" if step else "")


def list_made(folder: Path, most: int = _MAX_SHOWN) -> list[Made]:
    """The newest first; files that do not say how they were made are not ours and are left out."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                is_media = entry.name.lower().endswith(_SUFFIXES) and entry.name != _CONTACT_SHEET
                if is_media and not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
    except OSError:
        return []
    newest = sorted(found, reverse=True)[:most]
    made = [_read(folder / name, changed, size) for changed, name, size in newest]
    return [one for one in made if one is not None]


@lru_cache(maxsize=1024)
def _read(path: Path, _changed_ns: int, _num_bytes: int) -> Made | None:
    from frameloom.sampling.outputs import read_about

    try:
        return Made(path, read_about(path))
    except DataError:
        return None


def to_wish(made: Made) -> Wish:
    """The form filled in as it was for this file; DataError if the file says it in a form that is not known."""
    about = made.about
    try:
        return Wish(
            model=about.get("model", ""),
            prompt=about["prompt"],
            seed=int(about["seed"]),
            negative=about.get("sample.negative_prompt"),
            steps=_number(about, "steps", int),
            guidance=_number(about, "guidance", float),
            sampler=about.get("sample.sampler"),
            frames=_number(about, "frames", int),
            height=_number(about, "height", int),
            width=_number(about, "width", int),
            fps=_number(about, "fps", float),
            format=about.get("sample.format"),
            head=about.get("head"),
            tail=about.get("tail"),
        )
    except (ValueError, TypeError) as error:
        raise DataError(f"{made.path.name}: says how it was made in a form that is not known ({error})") from error


def convert_clip(made: Made, form: str, folder: Path) -> Path:
    """The clip in another container, kept in `folder` for the next time; the file itself if it has that form."""
    from frameloom.config.schema.sampling import SampleSection
    from frameloom.sampling.outputs import read_frames, write_clip

    if form not in FORMATS:
        raise DataError(f"{form[:20]}: no such format; choose {', '.join(FORMATS)}")
    if made.path.suffix.lower() in (f".{form}", ".png"):
        return made.path
    target = folder / f"{made.path.stem}-{digest_file(made.path)[:8]}.{form}"
    if not target.is_file():
        settings = SampleSection.model_validate({"format": form, "fps": float(made.about.get("sample.fps", "8"))})
        write_clip(target, read_frames(made.path), settings, {**made.about, "sample.format": form})
    return target


def keep_upload(path: Path, root: Path, *, max_bytes: int) -> str:
    """Decode a picture that was sent, and keep it as a png named by its content; gives its path from `root`."""
    from frameloom.data.media.decode import IMAGE_FORMATS, DecodeLimits, probe_image, read_image
    from frameloom.data.media.writing import write_image

    if path.suffix.lower() not in IMAGE_FORMATS:
        raise DataError(f"Image: {path.suffix or 'no ending'} is not taken; send {', '.join(IMAGE_FORMATS)}")
    if path.stat().st_size > max_bytes:
        raise DataError(f"Image: {path.stat().st_size:,} bytes; at most {max_bytes:,} are taken")
    limits = DecodeLimits(max_pixels=8192 * 8192)
    facts = probe_image(path, limits=limits)
    pixels_CFHW = read_image(path, height=facts.height, width=facts.width, limits=limits)
    folder = root / UPLOADS
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".upload-{uuid4().hex}.png"
    try:
        write_image(temporary, pixels_CFHW[:, 0].permute(1, 2, 0).contiguous().numpy())
        name = f"{digest_file(temporary)[:24]}.png"
        temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    return f"{UPLOADS}/{name}"


def _number(about: dict[str, str], name: str, kind: Callable[[Any], _Number]) -> _Number | None:
    text = about.get(f"sample.{name}")
    return None if text is None else kind(json.loads(text))


def _plain(text: str) -> str:
    try:
        return f"{float(text):g}"
    except ValueError:
        return text
