"""Samples of a run: those drawn in training by step, and those sampled later."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from pathlib import Path

from frameloom.core.errors import DataError

CLIPS = (".mp4", ".webm")
PICTURES = (".png", ".gif", ".jpg")
_STEP = re.compile(r"step-(\d{8,12})")
_SAMPLES = "samples"
_CONTACT_SHEET = "contact-sheet.png"
_NOT_SHOWN = ("checkpoints", "tensorboard", "export", "cache")
_MAX_SHOTS = 48


@dataclass(frozen=True)
class Shot:
    """One file to look at. `caption` is its prompt and seed where it tells them."""

    path: Path
    caption: str

    @property
    def is_clip(self) -> bool:
        return self.path.suffix.lower() in CLIPS


def list_steps(run: Path) -> list[int]:
    """Steps with samples or pictures, in order."""
    found = set()
    for folder in _media_folders(run):
        for name in _names(folder):
            match = _STEP.fullmatch(Path(name).stem)
            is_own = folder.name == _SAMPLES or Path(name).suffix.lower() in PICTURES
            if match is not None and is_own:
                found.add(int(match[1]))
    return sorted(found)


def read_step(run: Path, step: int) -> list[Shot]:
    """The samples of a step, then the validation's pictures."""
    stem, shots = f"step-{step:08d}", []
    for folder in _media_folders(run):
        if folder.name == _SAMPLES:
            shots += _read_folder(folder / stem)
        else:
            shots += [Shot(path, folder.name) for path in sorted(folder.glob(f"{stem}.*")) if _is_media(path)]
    return shots[:_MAX_SHOTS]


def read_later(run: Path) -> list[Shot]:
    """What `frameloom sample` put into the run's folder."""
    return _read_folder(run / _SAMPLES)[:_MAX_SHOTS]


def nearest_step(steps: list[int], wanted: float) -> int | None:
    """Of two runs that drew at different steps, the nearest ones are compared."""
    return min(steps, key=lambda step: (abs(step - wanted), step)) if steps else None


def slider_stride(steps: list[int]) -> int:
    """The largest stride from 0 that stops at every step."""
    return gcd(*steps) or 1


def read_caption(path: Path) -> str:
    """Prompt and seed of a file; its name, if it does not tell them."""
    try:
        status = path.stat()
    except OSError:
        return path.stem
    return _read_caption(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2048)
def _read_caption(path: Path, _changed_ns: int, _num_bytes: int) -> str:
    from frameloom.sampling.outputs import read_about

    try:
        about = read_about(path)
    except DataError:
        return path.stem
    return f"{about['prompt']} (seed {about['seed']})"


def _media_folders(run: Path) -> list[Path]:
    """`samples` first; of the others those whose pictures are named by step."""
    names = [name for name in sorted(_names(run)) if name not in _NOT_SHOWN and name != _SAMPLES]
    folders = [run / name for name in (_SAMPLES, *names)]
    return [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]


def _read_folder(folder: Path) -> list[Shot]:
    paths = [folder / name for name in sorted(_names(folder)) if name != _CONTACT_SHEET]
    return [Shot(path, read_caption(path)) for path in paths[: _MAX_SHOTS * 4] if _is_media(path)]


def _is_media(path: Path) -> bool:
    """A file of its own: a link could lead out of the folder."""
    return path.suffix.lower() in (*CLIPS, *PICTURES) and path.is_file() and not path.is_symlink()


def _names(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:
        return []
