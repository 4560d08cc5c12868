"""Writing the Moving Shapes dataset: clips, images and a manifest, the same bytes for the same seed.

out/
  shapes.json          what the set is: count, seed, shares; written first
  clips/00/000123.mp4  up to a thousand files per folder; images are .png
  manifest.parquet     one row per file; written last, so a set with a manifest is complete
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from frameloom.core.errors import DataError, RunError
from frameloom.core.files import PARTIAL, digest_file, remove_partial, write_json
from frameloom.core.process_pool import Heartbeat, Lost, ProcessPool
from frameloom.core.progress import ProgressBar
from frameloom.core.random import numpy_stream
from frameloom.core.text_files import read_object
from frameloom.data.media.writing import write_image, write_video
from frameloom.demo.shapes import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SPEEDS,
    ShapeAttributes,
    all_combinations,
    held_out_combinations,
    render_clip,
    write_caption,
)

MANIFEST_NAME = "manifest.parquet"
SETTINGS_NAME = "shapes.json"

_SIZES_HW = ((64, 64), (64, 96), (96, 64), (64, 80), (80, 64), (96, 96), (96, 128), (128, 96), (128, 128))
_FPS = (8, 12, 16)
_NUM_FRAMES = (9, 13, 17, 25)
# Longer clips would lose a shape of that speed over the edge.
_MOVING_NUM_FRAMES = {"slowly": (9, 13, 17), "quickly": (9,)}
_FILES_PER_FOLDER = 1000
_MAX_WORKERS = 4
_MIN_FILES_PER_WORKER = 32  # below this, starting a process costs more than it saves


@dataclass(frozen=True)
class PlannedClip:
    """One row of the set, before anything is drawn. `fps` is None for an image."""

    index: int
    attributes: ShapeAttributes
    caption: str
    split: str
    height_px: int
    width_px: int
    num_frames: int
    fps: int | None

    @property
    def path(self) -> str:
        suffix = "png" if self.fps is None else "mp4"
        return f"clips/{self.index // _FILES_PER_FOLDER:02d}/{self.index:06d}.{suffix}"


def write_shapes(
    out: Path,
    *,
    count: int,
    seed: int,
    image_share: float = 0.2,
    heldout_share: float = 0.1,
    num_workers: int | None = None,
) -> Path:
    """Write the set (or what an interrupted call left out) and return its manifest; a finished set is left as it is."""
    settings = _check_settings(count, seed, image_share, heldout_share)
    manifest = out / MANIFEST_NAME
    if _has_same_settings(out, settings) and manifest.exists():
        return manifest
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / SETTINGS_NAME, settings)
    clips = plan_clips(count, seed, image_share=image_share, heldout_share=heldout_share)
    for folder in {(out / clip.path).parent for clip in clips}:
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial(folder)
    with ProgressBar("Moving Shapes", count) as progress:
        files = []
        for file in _write_clips(out, clips, seed, num_workers):
            files.append(file)
            progress.advance()
    _write_manifest(manifest, clips, files)
    return manifest


def _check_settings(count: int, seed: int, image_share: float, heldout_share: float) -> dict[str, Any]:
    if count < 1:
        raise DataError(f"Moving Shapes: a set of {count} clips; ask for at least 1")
    for name, share in (("image_share", image_share), ("heldout_share", heldout_share)):
        if not 0 <= share <= 1:
            raise DataError(f"Moving Shapes: {name} is {share}; give a share between 0 and 1")
    return {
        "set": "moving-shapes",
        "version": 1,
        "count": count,
        "seed": seed,
        "image_share": image_share,
        "heldout_share": heldout_share,
    }


def _has_same_settings(out: Path, settings: dict[str, Any]) -> bool:
    """Whether `out` already belongs to this set; raises when it belongs to something else."""
    recorded = out / SETTINGS_NAME
    if not recorded.exists():
        others = sorted(p.name for p in out.iterdir() if not p.name.startswith(PARTIAL)) if out.exists() else []
        if others:
            raise DataError(f"{out}: holds other files ({others[0]}, ...); choose a new or an empty folder")
        return False
    found = read_object(recorded, error=DataError, fix="choose a new folder")
    differences = [
        f"{name} {found.get(name)} instead of {value}" for name, value in settings.items() if found.get(name) != value
    ]
    if differences:
        raise DataError(
            f"{out}: holds another set ({', '.join(differences)}); choose a new folder, "
            "or give the same numbers to go on with this one"
        )
    return True


def plan_clips(count: int, seed: int, *, image_share: float, heldout_share: float) -> list[PlannedClip]:
    """Decide every row: shares are exact to a row, and combinations are dealt round by round, like cards."""
    random = numpy_stream(seed, "shapes-plan")
    is_image = random.permutation(count) < round(count * image_share)
    is_heldout = random.permutation(count) < round(count * heldout_share)
    decks = {(image, heldout): _deal(image, heldout, random) for image, heldout in product((False, True), repeat=2)}
    clips = []
    for index in range(count):
        image, heldout = bool(is_image[index]), bool(is_heldout[index])
        clips.append(_plan_clip(index, next(decks[image, heldout]), "heldout" if heldout else "train", random))
    return clips


def _deal(image: bool, heldout: bool, random: np.random.Generator) -> Iterator[ShapeAttributes]:
    """Everything that rows of this kind may show, shuffled again and again. Speeds are paired so that every motion is
    equally frequent."""
    if image:
        cards = [ShapeAttributes(*values) for values in product(COLOURS, SHAPES, BACKGROUNDS)]
    else:
        cards = [
            ShapeAttributes(colour, shape, background, motion, None if motion == "still" else speed)
            for colour, shape, motion, background in all_combinations()
            for speed in SPEEDS
        ]
    deck = [card for card in cards if (card.combination in held_out_combinations()) == heldout]
    while True:
        for index in random.permutation(len(deck)):
            yield deck[index]


def _plan_clip(index: int, attributes: ShapeAttributes, split: str, random: np.random.Generator) -> PlannedClip:
    height_px, width_px = _SIZES_HW[random.integers(len(_SIZES_HW))]
    lengths = _MOVING_NUM_FRAMES.get(attributes.speed or "", _NUM_FRAMES)
    num_frames = lengths[random.integers(len(lengths))]
    fps = _FPS[random.integers(len(_FPS))]
    caption = write_caption(attributes, int(random.integers(6)))
    if attributes.motion is None:
        return PlannedClip(index, attributes, caption, split, height_px, width_px, 1, None)
    return PlannedClip(index, attributes, caption, split, height_px, width_px, num_frames, fps)


def _write_clips(
    out: Path, clips: Sequence[PlannedClip], seed: int, num_workers: int | None
) -> Iterator[tuple[int, str]]:
    """Bytes and digest of every file, in order, as they become ready."""
    if num_workers is None:
        num_workers = min(os.cpu_count() or 1, _MAX_WORKERS, len(clips) // _MIN_FILES_PER_WORKER)
    if num_workers <= 1:
        yield from (_write_clip((out, clip, seed)) for clip in clips)
        return

    def refuse(lost: Lost, task: object) -> None:
        raise RunError(
            f"{out}: a writing process {lost.what} (out of memory?); the finished files are kept, "
            "run the same command again to go on"
        )

    pool: ProcessPool[tuple[Path, PlannedClip, int], tuple[int, str]] = ProcessPool(
        _write_clip, num_workers=num_workers, ahead=8, name="shapes"
    )
    yield from pool.run(((out, clip, seed) for clip in clips), refuse)


def _write_clip(task: tuple[Path, PlannedClip, int], heartbeat: Heartbeat | None = None) -> tuple[int, str]:
    """Write one file unless it is there (a file that is there is complete); returns its bytes and SHA-256."""
    out, clip, seed = task
    path = out / clip.path
    if not path.exists():
        random = numpy_stream(seed, "shapes-clip", clip.index)
        frames_FHWC = render_clip(clip.attributes, clip.height_px, clip.width_px, clip.num_frames, random)
        metadata = {"caption": clip.caption}
        if clip.fps is None:
            write_image(path, frames_FHWC[0], metadata=metadata)
        else:
            write_video(path, frames_FHWC, clip.fps, metadata=metadata)
    return path.stat().st_size, digest_file(path)


def _write_manifest(path: Path, clips: Sequence[PlannedClip], files: Sequence[tuple[int, str]]) -> None:
    # The processes that write clips import this module and need no tables.
    import polars as pl

    from frameloom.data.manifest.manifest import write_manifest

    rows = [
        {
            "path": clip.path,
            "caption": clip.caption,
            "kind": "image" if clip.fps is None else "video",
            "height": clip.height_px,
            "width": clip.width_px,
            "frames": clip.num_frames,
            "fps": clip.fps,
            "bytes": num_bytes,
            "sha256": digest,
            "split": clip.split,
            **asdict(clip.attributes),
        }
        for clip, (num_bytes, digest) in zip(clips, files, strict=True)
    ]
    table = pl.DataFrame(rows, schema_overrides={"fps": pl.Float64, "motion": pl.String, "speed": pl.String})
    write_manifest(path, table)


def format_shapes(manifest: Path) -> list[str]:
    """What a finished set holds, as lines to print."""
    from frameloom.data.manifest.manifest import Manifest

    rows = Manifest.read(manifest)
    num_videos = int((rows.column("kind") == "video").sum())
    num_train = int((rows.column("split") == "train").sum())
    megabytes = int(rows.column("bytes").sum()) / 1e6
    sizes = sorted(set(zip(rows.width.tolist(), rows.height.tolist(), strict=True)))
    return [
        f"{manifest}: {num_videos} videos and {len(rows) - num_videos} images, {megabytes:.1f} MB",
        f"split: {num_train} train, {len(rows) - num_train} heldout (combinations that no training row shows)",
        "sizes: " + ", ".join(f"{width}x{height}" for width, height in sizes),
        f"first caption: {rows.caption(0)}",
    ]
