"""A small real set of clips and images that tests of the data path share; nobody may change its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from frameloom.data.buckets.grid import GridPolicy, build_grid
from frameloom.data.manifest.manifest import Manifest, write_manifest
from frameloom.data.media.writing import write_image, write_video

# name, height, width, frames, fps
VIDEOS = [
    ("a.mp4", 64, 64, 12, 24),
    ("b.mp4", 64, 64, 20, 24),
    ("c.mp4", 48, 80, 12, 24),
    ("d.mp4", 48, 80, 30, 48),
    ("e.mp4", 96, 96, 24, 24),
    ("f.mp4", 96, 96, 40, 24),
    ("g.mp4", 64, 64, 16, 12),
    ("h.mp4", 48, 80, 9, 24),
]
IMAGES = [("i.png", 64, 64), ("j.png", 96, 96), ("k.png", 48, 80)]


def draw_frames(seed: int, height: int, width: int, frames: int) -> np.ndarray:
    """A bright square that moves over a coloured ground; every frame of every clip is different."""
    ground = np.random.default_rng(seed).integers(20, 120, size=3)
    pixels = np.tile(ground.astype(np.uint8), (frames, height, width, 1))
    for frame in range(frames):
        left = (frame * 2) % (width - 8)
        pixels[frame, 8:24, left : left + 8] = 255 - 2 * frame
    return pixels


@pytest.fixture(scope="session")
def clip_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a manifest beside its files."""
    root = tmp_path_factory.mktemp("clips")
    rows = []
    for seed, (name, height, width, frames, fps) in enumerate(VIDEOS):
        write_video(root / name, draw_frames(seed, height, width, frames), fps, preset="ultrafast")
        rows.append((name, f"clip {name}", "video", height, width, frames, float(fps), "train"))
    for seed, (name, height, width) in enumerate(IMAGES):
        write_image(root / name, draw_frames(100 + seed, height, width, 1)[0])
        rows.append((name, f"image {name}", "image", height, width, 1, None, "train"))
    columns = ["path", "caption", "kind", "height", "width", "frames", "fps", "split"]
    write_manifest(root / "manifest.parquet", pl.DataFrame(rows, schema=columns, orient="row"))
    return root / "manifest.parquet"


@pytest.fixture(scope="session")
def manifest(clip_set: Path) -> Manifest:
    return Manifest.read(clip_set)


@pytest.fixture(scope="session")
def grid() -> GridPolicy:
    return build_grid({"64px": {1: [1.0, 2], 9: [1.0, 2], 17: [0.5, 2]}}, stride=16, fps_max=24)
