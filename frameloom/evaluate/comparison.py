"""Generated clips against reference clips: metrics of pairs and of single clips, and Fréchet distances of the sets.

Shape letters: C channels, F frames, H height, W width, D width of a feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    alone: ClipMeasures | None = None,
    prompts: Mapping[str, str] | None = None,
    confidence: float = 0.95,
    intervals: Intervals = "student",
) -> MetricTable:
    """Metrics of all pairs and of generated clips alone, and Fréchet distances if asked.

    `alone` measures the generated clips alone, against `prompts` by clip name; its network gives FID as well, if there
    are references. A clip that cannot be read, or does not fit its pair, is listed, and the rest goes on.
    """
    wanted = distances or Distances()
    given = {"fvd": wanted.clips, "fid": wanted.frames}
    sides: dict[str, Sides] = {
        name: (read_features(files[0]), read_features(files[1])) for name, files in given.items() if files is not None
    }
    has_reference = any(pair.reference is not None for pair in pairs)
    network = None if alone is None or "fid" in sides or not has_reference else alone.network
    video_network = wanted.network if "fvd" not in sides and has_reference else None
    notes = []
    if network is not None:
        sides["fid"] = FeatureStatistics(), FeatureStatistics()
        notes.append(f"fid is of features of {network.name}; published ones are of Inception's and not comparable")
    if video_network is not None:
        sides["fvd"] = FeatureStatistics(), FeatureStatistics()
        notes.append(f"fvd is of features of {video_network.name}; published ones are of I3D's and not comparable")
    if wanted.pixels:
        sides["frechet_pixels"] = FeatureStatistics(), FeatureStatistics()

    def gather(videos: Sequence[Tensor | None]) -> Tensor | None:
        """Add both sides to the statistics; features of our frames, if there are any."""
        ours_FD = None
        for side, video in enumerate(videos):
            if video is None:
                continue
            if wanted.pixels:
                sides["frechet_pixels"][side].add(pool_pixels(to_signed_range(video[None])))
            if video_network is not None:
                sides["fvd"][side].add(video_network.encode_clip(video)[None].numpy())
            if network is not None:
                features_FD = network.encode_frames(video)
                sides["fid"][side].add(features_FD.numpy())
                ours_FD = features_FD if side == 0 else ours_FD
        return ours_FD

    records: list[Record] = []
    with ProgressBar("comparing", len(pairs)) as bar:
        for pair in pairs:
            try:
                clips = (pair.ours, pair.reference)
                videos = [None if clip is None else view_clip(clip, view).pixels_CFHW for clip in clips]
                features_FD = gather(videos)
                numbers = _measure_pair(pair, videos, measures) if measures.columns else {}
                if alone is not None and alone.columns and pair.ours is not None and videos[0] is not None:
                    prompt = (prompts or {}).get(pair.ours.name)
                    numbers |= alone(videos[0], prompt, features_FD=features_FD, name=pair.name)
                # A readable clip without a pair, where none is expected, has no record.
                records += [{"name": pair.name, **numbers, "error": None}] if numbers else []
            except DataError as error:
                records.append({"name": pair.name, "error": str(error)})
            bar.advance(note=pair.name)
    more, distance_notes = _measure_distances(sides)
    columns = [*measures.columns, *(alone.columns if alone else [])]
    return MetricTable(records, columns, confidence, more, [*distance_notes, *notes], intervals)


def _measure_pair(pair: Pair, videos: Sequence[Tensor | None], measures: Measures) -> dict[str, float | None]:
    ours, reference = videos
    if ours is None or reference is None:
        missing = "reference" if reference is None else "generated"
        raise DataError(f"{pair.name}: no {missing} clip has this name; it is in no pair")
    frames, sizes = (ours.shape[1], reference.shape[1]), [f"{one.shape[3]}x{one.shape[2]}" for one in (ours, reference)]
    if frames[0] != frames[1]:
        raise DataError(
            f"{pair.name}: {frames[0]} generated and {frames[1]} reference frames; compare the first ones "
            f"with --frames {min(frames)}, or fewer"
        )
    if ours.shape != reference.shape:
        raise DataError(
            f"{pair.name}: {sizes[0]} generated and {sizes[1]} reference pixels; scale both with --height and --width"
        )
    return measures(to_signed_range(ours[None]), to_signed_range(reference[None]))


def _measure_distances(gathered: Mapping[str, Sides]) -> tuple[dict[str, float | int], list[str]]:
    more: dict[str, float | int] = {}
    notes = []
    for name in ("fvd", "fid", "frechet_pixels"):
        if name not in gathered:
            continue
        sides = gathered[name]
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
    if len(ours) == len(reference) == 1:  # two files named explicitly form a pair
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
