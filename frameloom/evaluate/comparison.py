"""Generated clips against reference clips: metrics of pairs and of single clips, and Fréchet distances of the sets.

Shape letters: C channels, F frames, H height, W width, D width of a feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from torch import Tensor

from frameloom.core.errors import DataError
from frameloom.core.progress import ProgressBar
from frameloom.data.loading.clip_view import ClipView, ListedClip, view_clip
from frameloom.data.media.transforms import to_signed_range
from frameloom.evaluate.clip_metrics import ClipMeasures
from frameloom.evaluate.frechet import FeatureStatistics, frechet_distance, pool_pixels, read_features
from frameloom.evaluate.metric_table import Intervals, MetricTable, Record
from frameloom.evaluate.networks import VideoNetwork
from frameloom.evaluate.pair_metrics import Measures

Pairing = Literal["name", "order", "none"]
# By distance: what is counted, and how many of them published numbers are of.
_USUAL = {"fvd": ("clips", 2048), "fid": ("frames", 10_000), "frechet_pixels": ("clips", 2048)}
Sides = tuple[FeatureStatistics, FeatureStatistics]


def compare_sets(
    pairs: Sequence[Pair],
    measures: Measures,
    *,
    view: ClipView,
    distances: Distances | None = None,
    alone: Alone | None = None,
    confidence: float = 0.95,
    intervals: Intervals = "student",
) -> MetricTable:
    """Metrics of all pairs and of generated clips alone, and Fréchet distances if asked.

    A network of `alone` gives FID as well, when there are references. A clip that cannot be read, or does not fit its
    pair, is listed, and the rest goes on.
    """
    wanted = distances or Distances()
    network = None if alone is None else alone.measures.network
    gathered: dict[str, Sides] = {}
    for name, files in (("fvd", wanted.clips), ("fid", wanted.frames)):
        if files is not None:
            gathered[name] = (read_features(files[0]), read_features(files[1]))
    work = _Work(measures, view, alone, _new_sides() if wanted.pixels else None)
    has_reference = any(pair.reference is not None for pair in pairs)
    if network is not None and "fid" not in gathered and has_reference:
        work.frames = _new_sides()
    if wanted.network is not None and "fvd" not in gathered and has_reference:
        work.video_network, work.clips = wanted.network, _new_sides()
    records = []
    with ProgressBar("comparing", len(pairs)) as bar:
        for pair in pairs:
            records += work.compare(pair)
            bar.advance(note=pair.name)
    for name, sides in (("fvd", work.clips), ("fid", work.frames), ("frechet_pixels", work.pooled)):
        if sides is not None:
            gathered[name] = sides
    more, notes = _measure_distances(gathered)
    if work.frames is not None and network is not None:
        notes.append(f"fid is of features of {network.name}; published ones are of Inception's and not comparable")
    if work.video_network is not None:
        notes.append(f"fvd is of features of {work.video_network.name}; published ones are of I3D's and not comparable")
    columns = [*measures.columns, *(alone.measures.columns if alone else [])]
    return MetricTable(records, columns, confidence, more, notes, intervals)


def _new_sides() -> Sides:
    return FeatureStatistics(), FeatureStatistics()


@dataclass
class _Work:
    """What is done with each pair, and the statistics that grow on the way."""

    measures: Measures
    view: ClipView
    alone: Alone | None
    pooled: Sides | None = None
    frames: Sides | None = None
    clips: Sides | None = None
    video_network: VideoNetwork | None = None

    def compare(self, pair: Pair) -> list[Record]:
        """One record; none for a good clip that has no pair and is not meant to have one."""
        try:
            clips = (pair.ours, pair.reference)
            videos = [None if clip is None else view_clip(clip, self.view).pixels_CFHW for clip in clips]
            features_FD = self._gather(videos)
            ours, reference = videos
            numbers: dict[str, float | None] = {}
            if self.measures.columns:
                numbers |= self._measure_pair(pair, ours, reference)
            if self.alone is not None and self.alone.measures.columns and ours is not None:
                numbers |= self._measure_alone(pair, ours, features_FD)
            return [{"name": pair.name, **numbers, "error": None}] if numbers else []
        except DataError as error:
            return [{"name": pair.name, "error": str(error)}]

    def _gather(self, videos: Sequence[Tensor | None]) -> Tensor | None:
        """Add both sides to the statistics; features of our frames, if there are any."""
        ours_FD = None
        for side, video in enumerate(videos):
            if video is None:
                continue
            if self.pooled is not None:
                self.pooled[side].add(pool_pixels(to_signed_range(video[None])))
            if self.clips is not None and self.video_network is not None:
                self.clips[side].add(self.video_network.encode_clip(video)[None].numpy())
            if self.frames is not None and self.alone is not None and self.alone.measures.network is not None:
                features_FD = self.alone.measures.network.encode_frames(video)
                self.frames[side].add(features_FD.numpy())
                ours_FD = features_FD if side == 0 else ours_FD
        return ours_FD

    def _measure_pair(self, pair: Pair, ours: Tensor | None, reference: Tensor | None) -> dict[str, float | None]:
        if ours is None or reference is None:
            missing = "reference" if reference is None else "generated"
            raise DataError(f"{pair.name}: no {missing} clip has this name; it is in no pair")
        pixels = to_signed_range(ours[None]), to_signed_range(reference[None])
        _refuse_misfit(pair, *pixels)
        return self.measures(*pixels)

    def _measure_alone(self, pair: Pair, ours: Tensor, features_FD: Tensor | None) -> dict[str, float | None]:
        assert self.alone is not None and pair.ours is not None
        try:
            return self.alone.measures(ours, self.alone.prompts.get(pair.ours.name), features_FD=features_FD)
        except DataError as error:
            raise DataError(f"{pair.name}: {error}") from error


def _refuse_misfit(pair: Pair, ours: Tensor, reference: Tensor) -> None:
    if ours.shape[2] != reference.shape[2]:
        fewer = min(ours.shape[2], reference.shape[2])
        raise DataError(
            f"{pair.name}: {ours.shape[2]} generated and {reference.shape[2]} reference frames; compare the first ones "
            f"with --frames {fewer}, or fewer"
        )
    if ours.shape != reference.shape:
        sizes = [f"{video.shape[4]}x{video.shape[3]}" for video in (ours, reference)]
        raise DataError(
            f"{pair.name}: {sizes[0]} generated and {sizes[1]} reference pixels; scale both with --height and --width"
        )


def _measure_distances(gathered: Mapping[str, Sides]) -> tuple[dict[str, float | int], list[str]]:
    more: dict[str, float | int] = {}
    notes = []
    for name, sides in gathered.items():
        what, usual = _USUAL[name]
        fewest = min(side.count for side in sides)
        more[f"{name}_{what}"] = fewest
        if fewest < 2:
            notes.append(f"{name} needs at least 2 {what} on either side; there is {fewest}")
            continue
        more[name] = frechet_distance(*sides)
        if fewest < usual:
            notes.append(f"{name} is of {fewest} {what} on a side; below {usual} it comes out too high")
    if "frechet_pixels" in gathered:
        notes.append("frechet_pixels compares coarse thumbnails; it is no FVD, which needs features of a network")
    return more, notes


@dataclass(frozen=True)
class Distances:
    """Which Fréchet distances are wanted: of coarse `pixels`, of features of whole `clips` (FVD), of `frames` (FID).

    Features of clips are read from files, or `network` makes them.
    """

    pixels: bool = False
    clips: tuple[Path, Path] | None = None
    frames: tuple[Path, Path] | None = None
    network: VideoNetwork | None = None


@dataclass(frozen=True)
class Alone:
    """Metrics of the generated clips alone, and the prompt of each by its name."""

    measures: ClipMeasures
    prompts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """A clip and the one it is measured against; one of them is None when nothing stands opposite."""

    name: str
    ours: ListedClip | None
    reference: ListedClip | None


def pair_clips(ours: Sequence[ListedClip], reference: Sequence[ListedClip], how: Pairing) -> list[Pair]:
    """By path without its ending, or one after the other; DataError when no pair, or no clear pairing, is found."""
    if how == "none":
        alone = [Pair(clip.name, clip, None) for clip in ours]
        return alone + [Pair(clip.name, None, clip) for clip in reference]
    if how == "order":
        if len(ours) != len(reference):
            raise DataError(
                f"{len(ours)} generated and {len(reference)} reference clips cannot be paired by order; make the "
                "numbers equal, or pair them by name"
            )
        return [Pair(pair[0].name, *pair) for pair in zip(ours, reference, strict=True)]
    if len(ours) == len(reference) == 1:  # two files that a person names are meant for each other
        return [Pair(ours[0].name, ours[0], reference[0])]
    left, right = _by_name(ours, "generated"), _by_name(reference, "reference")
    if not left.keys() & right.keys():
        raise DataError(
            f"no generated clip has the name of a reference clip ('{next(iter(left))}' and '{next(iter(right))}' are "
            "the first of each); rename the files, or pair them with --pairs order"
        )
    return [Pair(name, left.get(name), right.get(name)) for name in dict.fromkeys([*left, *right])]


def _by_name(clips: Sequence[ListedClip], side: str) -> dict[str, ListedClip]:
    found: dict[str, ListedClip] = {}
    for clip in clips:
        name = str(PurePosixPath(clip.name).with_suffix(""))
        if name in found:
            raise DataError(
                f"the {side} clips '{found[name].name}' and '{clip.name}' have the same name; keep one of them, or "
                "pair with --pairs order"
            )
        found[name] = clip
    return found
