"""Folders of samples of the same prompts and seeds: metrics side by side, paired differences, and an HTML page.

Shape letters: C channels, F frames, H height, W width.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from frameloom.core.errors import DataError
from frameloom.core.logging import get_logger
from frameloom.core.progress import ProgressBar
from frameloom.data.loading.clip_view import ListedClip
from frameloom.data.media.writing import CONTACT_SHEET, write_video
from frameloom.evaluate.clip_metrics import ClipMeasures
from frameloom.evaluate.metric_table import CONFIDENCE, Summary, bootstrap_mean, summarise
from frameloom.evaluate.reports import write_page
from frameloom.sampling.outputs import FIRST_FRAME, read_about
from frameloom.sampling.request import read_prompts

Frames = NDArray[np.uint8]
ReadFrames = Callable[[Path], Frames]
_LEAD = "The same prompts and the same seeds, side by side; a row of numbers for each metric, then the clips."
_FOLDER_FPS = 8  # a folder of frames does not say how fast it plays
_SUFFIXES = (".mp4", ".webm", ".gif", ".png")
_SAMPLES = "samples"
_log = get_logger(__name__)


class Key(NamedTuple):
    """What a sample was made from; `number` counts samples of a folder that were made from the same."""

    prompt: str
    seed: int
    number: int = 0


@dataclass(frozen=True)
class SampleSet:
    """A sample is a file, or a folder of frames."""

    name: str
    files: Mapping[Key, Path]


@dataclass(frozen=True)
class ComparedSets:
    """`numbers` are by set, then by key, then by column."""

    sets: Sequence[SampleSet]
    keys: Sequence[Key]
    columns: Sequence[str]
    numbers: Sequence[Mapping[Key, Mapping[str, float | None]]]
    confidence: float = CONFIDENCE

    @property
    def num_left_out(self) -> int:
        """Samples that not all sets have."""
        return sum(len(samples.files) - len(self.keys) for samples in self.sets)

    def values(self, column: str) -> list[list[float]]:
        """By set, over the keys for which every set has a number."""
        rows = [[found[key].get(column) for found in self.numbers] for key in self.keys]
        whole = [row for row in rows if all(value is not None for value in row)]
        return [[float(row[place] or 0.0) for row in whole] for place in range(len(self.sets))]

    def summaries(self) -> dict[str, list[Summary]]:
        """By column, one for each set; intervals by bootstrap. A column without numbers is left out."""
        return {
            column: [summarise(part, self.confidence, "bootstrap") for part in values]
            for column in self.columns
            if (values := self.values(column))[0]
        }

    def differences(self, column: str) -> list[tuple[float, float, float]]:
        """(mean, low, high) of each further set minus the first, prompt by prompt."""
        first, *others = self.values(column)
        pairs = [np.subtract(other, first) for other in others]
        return [(float(gap.mean()), *bootstrap_mean(gap.tolist(), self.confidence)) for gap in pairs]


def compare_samples(
    sets: Sequence[SampleSet], measures: ClipMeasures, read_frames: ReadFrames, *, confidence: float = CONFIDENCE
) -> ComparedSets:
    """Measure every sample that all sets have."""
    keys = match_samples(sets)
    numbers = []
    with ProgressBar("measuring", len(sets) * len(keys)) as bar:
        for samples in sets:
            found = {}
            for key in keys:
                pixels_CFHW = torch.from_numpy(read_frames(samples.files[key])).permute(3, 0, 1, 2)
                found[key] = measures(pixels_CFHW, key.prompt)
                bar.advance(note=samples.files[key].name)
            numbers.append(found)
    return ComparedSets(sets, keys, measures.columns, numbers, confidence)


def match_samples(sets: Sequence[SampleSet]) -> list[Key]:
    """What all sets have, in the order of the first; DataError when that is nothing."""
    if len(sets) < 2:
        raise DataError(f"{len(sets)} set of samples; a comparison needs two or more folders")
    common = [key for key in sets[0].files if all(key in other.files for other in sets[1:])]
    if not common:
        keys = [(samples.name, next(iter(samples.files))) for samples in sets]
        firsts = "; ".join(f"{name} has '{key.prompt}' with seed {key.seed}" for name, key in keys)
        raise DataError(f"no prompt and seed is in all folders ({firsts}); sample them from the same prompts and seeds")
    return common


def format_sets(compared: ComparedSets) -> list[str]:
    """Plain text: a line for each metric and set."""
    lines = [f"{len(compared.keys)} prompts and seeds in all {len(compared.sets)} folders"]
    if compared.num_left_out:
        lines.append(f"note: {compared.num_left_out} samples are left out; not all folders have them")
    for column, summaries in compared.summaries().items():
        gaps = ["", *(f", {_format_gap(gap)}" for gap in compared.differences(column))]
        for samples, summary, gap in zip(compared.sets, summaries, gaps, strict=True):
            lines.append(f"{column}  {samples.name}: {_format_summary(summary)}{gap}")
    return lines


def write_comparison(compared: ComparedSets, out: Path, read_frames: ReadFrames, *, max_shown: int = 24) -> None:
    """One file with everything in it; the first `max_shown` prompts are shown, all are measured."""
    names = [samples.name for samples in compared.sets]
    rows = [
        [column, *map(_format_summary, summaries), *map(_format_gap, compared.differences(column))]
        for column, summaries in compared.summaries().items()
    ]
    explanation = (
        f"Means over {len(compared.keys)} prompts and seeds that all sets have, with {compared.confidence:.0%} "
        "intervals by bootstrap. A difference whose interval holds 0 may be chance."
    )
    if compared.num_left_out:
        explanation += f" {compared.num_left_out} samples are left out, because not all sets have them."
    shown = compared.keys[:max_shown]
    with tempfile.TemporaryDirectory() as folder:
        write_page(
            out,
            "evaluate/sample_sets.html",
            title=" / ".join(names),
            lead=_LEAD,
            header=["metric", *names, *(f"{name} minus {names[0]}" for name in names[1:])],
            rows=rows,
            explanation=explanation,
            shown=[(key, _list_cards(compared, key, read_frames, Path(folder))) for key in shown],
            num_hidden=len(compared.keys) - len(shown),
        )


def _list_cards(compared: ComparedSets, key: Key, read_frames: ReadFrames, folder: Path) -> list[tuple[Path, str, str]]:
    """(file, name of the set, its numbers); a folder of frames becomes a video in `folder`."""
    cards = []
    for samples, numbers in zip(compared.sets, compared.numbers, strict=True):
        path = samples.files[key]
        if path.is_dir():
            joined = folder / f"{len(list(folder.iterdir()))}.mp4"
            write_video(joined, read_frames(path), _FOLDER_FPS)
            path = joined
        note = ", ".join(f"{name} {value:.3g}" for name, value in numbers[key].items() if value is not None)
        cards.append((path, samples.name, note))
    return cards


def _format_summary(summary: Summary) -> str:
    if summary.low is None or summary.high is None:
        return f"{summary.mean:.4g}"
    return f"{summary.mean:.4g} ({summary.low:.4g} to {summary.high:.4g})"


def _format_gap(gap: tuple[float, float, float]) -> str:
    mean, low, high = gap
    return f"{mean:+.4g} ({low:+.4g} to {high:+.4g})"


def find_samples(source: Path) -> dict[Key, Path]:
    """The samples of a folder, or of a run: what was sampled from it, else those of its last step in training."""
    if not source.is_dir():
        raise DataError(f"{source}: no such folder; name a folder of samples, or a run")
    inner = source / _SAMPLES
    steps = sorted((path for path in inner.glob("step-*") if path.is_dir()), reverse=True)
    for folder in [source, inner, *steps] if inner.is_dir() else [source]:
        if samples := _read_folder(folder):
            return samples
    raise DataError(
        f"{source}: no file there says its prompt and seed; name a folder that `frameloom sample` wrote, or a run"
    )


def _read_folder(folder: Path) -> dict[Key, Path]:
    found: dict[Key, Path] = {}
    counts: Counter[tuple[str, int]] = Counter()
    for path in sorted(folder.iterdir()):
        is_clip = path.suffix.lower() in _SUFFIXES if path.is_file() else (path / FIRST_FRAME).is_file()
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
        found[Key(*key, counts[key])] = path
        counts[key] += 1
    return found


def name_folders(folders: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise DataError(f"{', '.join(map(str, folders))}: the same folder twice; name different ones")
    length = 1
    while len({part[-length:] for part in parts}) < len(parts):
        length += 1
    return [str(Path(*part[-length:])) for part in parts]


def find_prompts(clips: Sequence[ListedClip], file: Path | None) -> dict[str, str]:
    """The prompt of each clip by its name: from `file`, in the order of the clips, or from the clips themselves.

    A clip that does not say its prompt is left out.
    """
    if file is None:
        found = {}
        for clip in clips:
            with suppress(DataError):
                if clip.member is None:
                    found[clip.name] = read_about(clip.root / clip.path)["prompt"]
        return found
    prompts = read_prompts([], file)
    if len(prompts) != len(clips):
        raise DataError(f"{file}: {len(prompts)} prompts for {len(clips)} clips; give one for each, in their order")
    return {clip.name: prompt for clip, prompt in zip(clips, prompts, strict=True)}
