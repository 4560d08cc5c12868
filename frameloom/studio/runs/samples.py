"""Samples as files, with their metadata: those of a run by step, and any others."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from frameloom.core.errors import DataError
from frameloom.data.media.writing import CONTACT_SHEET

CLIPS = (".mp4", ".webm")
PICTURES = (".png", ".gif", ".jpg")
_STEP = re.compile(r"step-(\d{8,12})")
_SAMPLES = "samples"
_NOT_SHOWN = ("checkpoints", "tensorboard", "export", "cache")
_MAX_SHOWN = 48


@dataclass(frozen=True)
class SavedSample:
    """A file and its metadata; empty for a file that does not say how it was made, which then has a `label`."""

    path: Path
    about: Mapping[str, str] = field(default_factory=dict)
    label: str = ""

    @property
    def is_clip(self) -> bool:
        return self.path.suffix.lower() in CLIPS

    @property
    def caption(self) -> str:
        about = self.about
        return f"{about['prompt']} (seed {about['seed']})" if about else self.label or self.path.stem

    def describe(self) -> str:
        """One line of the settings that matter most."""
        about = {name.removeprefix("sample."): value.removesuffix(".0") for name, value in self.about.items()}
        frames, step = about.get("frames", "1"), about.get("step")
        model = about.get("model", about.get("run", "?")) + (f" at step {step}" if step else "")
        length = "1 frame" if frames == "1" else f"{frames} frames at {about.get('fps', '?')} fps"
        settings = f"{about.get('steps', '?')} steps, guidance {about.get('guidance', '?')}"
        size = f"{about.get('width', '?')}x{about.get('height', '?')}"
        return f"seed {about['seed']} · {settings} · {size} · {length} · {model}"


def read_sample(path: Path) -> SavedSample:
    try:
        status = path.stat()
    except OSError:
        return SavedSample(path)
    return _read_sample(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4096)
def _read_sample(path: Path, _changed_ns: int, _num_bytes: int) -> SavedSample:
    from frameloom.sampling.outputs import read_about

    try:
        return SavedSample(path, read_about(path))
    except DataError:
        return SavedSample(path)


def list_steps(run: Path) -> list[int]:
    """Steps with samples or pictures, in order."""
    paths = [
        Path(name)
        for folder in _media_folders(run)
        for name in _names(folder)
        if folder.name == _SAMPLES or Path(name).suffix.lower() in PICTURES
    ]
    return sorted({int(match[1]) for path in paths if (match := _STEP.fullmatch(path.stem))})


def read_step(run: Path, step: int | None) -> list[SavedSample]:
    """The samples of a step, then the validation's pictures; None: what `frameloom sample` wrote into the run."""
    samples = []
    for folder in _media_folders(run):
        if folder.name == _SAMPLES:
            inner = folder if step is None else folder / f"step-{step:08d}"
            paths = [inner / name for name in sorted(_names(inner)) if name != CONTACT_SHEET][: _MAX_SHOWN * 4]
            samples += [read_sample(path) for path in paths if _is_media(path)]
        elif step is not None:
            paths = sorted(folder.glob(f"step-{step:08d}.*"))
            samples += [SavedSample(path, label=folder.name) for path in paths if _is_media(path)]
    return samples[:_MAX_SHOWN]


def _media_folders(run: Path) -> list[Path]:
    """`samples` first; of the others those whose pictures are named by step."""
    names = [name for name in sorted(_names(run)) if name not in _NOT_SHOWN and name != _SAMPLES]
    folders = [run / name for name in (_SAMPLES, *names)]
    return [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]


def _is_media(path: Path) -> bool:
    """A file of its own: a link could lead out of the folder."""
    return path.suffix.lower() in (*CLIPS, *PICTURES) and path.is_file() and not path.is_symlink()


def _names(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:
        return []
