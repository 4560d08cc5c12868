"""Two sets of clips: pairs compared pixel by pixel, and the sets as a whole.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import torch
from torch import Tensor

from frameloom.core.errors import DataError
from frameloom.core.progress import ProgressBar
from frameloom.data.clip_view import ClipView, ListedClip, view_clip
from frameloom.evaluate.frechet import FeatureStatistics, frechet_distance, pool_pixels, read_features
from frameloom.evaluate.measures import Measures
from frameloom.evaluate.metric_table import MetricTable, Record

Pairing = Literal["name", "order", "none"]
_FEW_CLIPS = 2048  # published Fréchet distances are of this many clips


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


def compare_sets(
    pairs: Sequence[Pair],
    measures: Measures,
    *,
    view: ClipView,
    with_pixels: bool = False,
    features: tuple[Path, Path] | None = None,
    confidence: float = 0.95,
) -> MetricTable:
    """Metrics of all pairs, and Fréchet distances if asked: `features` of a network (FVD), or of pooled pixels.

    A clip that cannot be read, or does not fit its pair, is listed, and the rest goes on.
    """
    given = None if features is None else (read_features(features[0]), read_features(features[1]))
    pooled = (FeatureStatistics(), FeatureStatistics()) if with_pixels else None
    records = []
    with ProgressBar("comparing", len(pairs)) as bar:
        for pair in pairs:
            records += _compare(pair, measures, view, pooled)
            bar.advance(note=pair.name)
    more, notes = _measure_distances(given, pooled)
    return MetricTable(records, measures.columns, confidence, more, notes)


def _compare(
    pair: Pair, measures: Measures, view: ClipView, pooled: tuple[FeatureStatistics, FeatureStatistics] | None
) -> list[Record]:
    """One record; none for a good clip that has no pair and is not meant to have one."""
    try:
        videos = [None if clip is None else _read(clip, view) for clip in (pair.ours, pair.reference)]
        for statistics, video in zip(pooled or (), videos, strict=False):
            if video is not None:
                statistics.add(pool_pixels(video))
        ours, reference = videos
        if not measures.columns:
            return []
        if ours is None or reference is None:
            missing = "reference" if reference is None else "generated"
            raise DataError(f"{pair.name}: no {missing} clip has this name; it is in no pair")
        _refuse_misfit(pair, ours, reference)
        return [{"name": pair.name, **measures(ours, reference), "error": None}]
    except DataError as error:
        return [{"name": pair.name, "error": str(error)}]


def _read(clip: ListedClip, view: ClipView) -> Tensor:
    pixels_CFHW = view_clip(clip, view).pixels_CFHW
    return pixels_CFHW[None].to(torch.float32).div_(127.5).sub_(1)


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


def _measure_distances(
    given: tuple[FeatureStatistics, FeatureStatistics] | None,
    pooled: tuple[FeatureStatistics, FeatureStatistics] | None,
) -> tuple[dict[str, float | int], list[str]]:
    more: dict[str, float | int] = {}
    notes = []
    for name, sides in (("fvd", given), ("frechet_pixels", pooled)):
        if sides is None:
            continue
        fewest = min(side.count for side in sides)
        more[f"{name}_clips"] = fewest
        if fewest < 2:
            notes.append(f"{name} needs at least 2 clips on either side; there is {fewest}")
            continue
        more[name] = frechet_distance(*sides)
        if fewest < _FEW_CLIPS:
            notes.append(f"{name} is of {fewest} clips on a side; below {_FEW_CLIPS} it comes out too high")
    if pooled is not None:
        notes.append("frechet_pixels compares coarse thumbnails; it is no FVD, which needs features of a network")
    return more, notes
