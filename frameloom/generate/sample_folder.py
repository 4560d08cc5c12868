"""What a folder of samples holds: files with the prompt and seed that they were made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from frameloom.core.errors import DataError
from frameloom.core.log import get_logger
from frameloom.data.clip_view import ListedClip
from frameloom.generate.outputs import read_about
from frameloom.generate.pipeline import CONTACT_SHEET
from frameloom.generate.prompts import read_prompts

_log = get_logger(__name__)
_SUFFIXES = (".mp4", ".webm", ".gif", ".png")
_FIRST_FRAME = "00000.png"
_SAMPLES = "samples"


@dataclass(frozen=True)
class Sample:
    """A file, or a folder of frames. `number` counts samples of the same prompt and seed in a folder, from 0."""

    path: Path
    prompt: str
    seed: int
    number: int = 0


def find_samples(source: Path) -> list[Sample]:
    """The samples of a folder, or of a run: what was sampled from it, else those of its last step in training."""
    for folder in _list_places(source):
        if samples := _read_folder(folder):
            return samples
    raise DataError(
        f"{source}: no file there says its prompt and seed; name a folder that `frameloom sample` wrote, or a run"
    )


def _list_places(source: Path) -> list[Path]:
    if not source.is_dir():
        raise DataError(f"{source}: no such folder; name a folder of samples, or a run")
    inner = source / _SAMPLES
    steps = sorted((place for place in inner.glob("step-*") if place.is_dir()), reverse=True)
    return [source, inner, *steps] if inner.is_dir() else [source]


def _read_folder(folder: Path) -> list[Sample]:
    found = []
    seen: Counter[tuple[str, int]] = Counter()
    for path in sorted(folder.iterdir()):
        is_clip = path.suffix.lower() in _SUFFIXES if path.is_file() else (path / _FIRST_FRAME).is_file()
        if not is_clip or path.name == CONTACT_SHEET:
            continue
        try:
            about = read_about(path)
        except DataError as error:
            _log.warning("left out: %s", error)
            continue
        if not about["seed"].lstrip("-").isdigit():
            raise DataError(f"{path}: its seed is {about['seed']!r}, not a number; make it again")
        key = (about["prompt"], int(about["seed"]))
        found.append(Sample(path, *key, seen[key]))
        seen[key] += 1
    return found


def find_prompts(clips: Sequence[ListedClip], file: Path | None) -> dict[str, str]:
    """The prompt of each clip by its name: from `file`, in the order of the clips, or from the clips themselves.

    A clip that does not say its prompt is left out.
    """
    if file is None:
        found = {clip.name: _read_prompt(clip) for clip in clips}
        return {name: prompt for name, prompt in found.items() if prompt is not None}
    prompts = read_prompts([], file)
    if len(prompts) != len(clips):
        raise DataError(f"{file}: {len(prompts)} prompts for {len(clips)} clips; give one for each, in their order")
    return {clip.name: prompt for clip, prompt in zip(clips, prompts, strict=True)}


def _read_prompt(clip: ListedClip) -> str | None:
    try:
        return None if clip.member is not None else read_about(clip.root / clip.path)["prompt"]
    except DataError:
        return None


def name_folders(folders: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise DataError(f"{', '.join(map(str, folders))}: the same folder twice; name different ones")
    length = 1
    while len({part[-length:] for part in parts}) < len(parts):
        length += 1
    return [str(Path(*part[-length:])) for part in parts]
