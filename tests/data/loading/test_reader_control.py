"""Control clips: read beside the clips, the same frames and the same cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from frameloom.builders.data import build_policy
from frameloom.config.schema.data import DataSection, TransformSection
from frameloom.core.errors import DataError
from frameloom.data.loading.batch import BatchRequest
from frameloom.data.loading.reader import BatchReader
from frameloom.data.manifest.manifest import Manifest


def write_manifest(world: Any, path: Path, control: pl.Expr) -> Manifest:
    table = pl.read_parquet(world.shared / "data" / "manifest.parquet").filter(pl.col("kind") == "video")
    table.with_columns(control.alias("control")).write_parquet(path)
    return Manifest.read(path, root=world.shared / "data")


def read(world: Any, manifest: Manifest, **settings: Any) -> Any:
    recipe = world.recipe(data={"buckets": {"_delete_": True, "64px": {"5": [1.0, 4]}}})
    policy = build_policy(recipe)
    reader = BatchReader(manifest, policy, seed=3, data=DataSection(control=True, **settings))
    rows = np.arange(4, dtype=np.int64)
    return reader.read(BatchRequest(0, 0, 0, rows, rows))


def test_frames_crops_and_mirroring_are_those_of_the_clip(world: Any, tmp_path: Path) -> None:
    manifest = write_manifest(world, tmp_path / "own.parquet", pl.col("path"))
    transforms = (TransformSection(name="resize"), TransformSection(name="random_crop"))
    batch = read(world, manifest, flip=0.5, transforms=transforms, frame_start="random")
    assert batch.control_BCFHW.dtype == torch.uint8 and not batch.bad
    assert torch.equal(batch.control_BCFHW, batch.pixels_BCFHW)
    others = write_manifest(world, tmp_path / "others.parquet", pl.col("path").reverse())
    assert others.fingerprint != manifest.fingerprint
    changed = read(world, others, flip=0.5, transforms=transforms, frame_start="random")
    assert torch.equal(changed.pixels_BCFHW, batch.pixels_BCFHW)
    assert not torch.equal(changed.control_BCFHW, batch.control_BCFHW)


def test_a_control_clip_that_cannot_be_read_counts_as_a_bad_clip(world: Any, tmp_path: Path) -> None:
    gone = pl.when(pl.col("path") == pl.col("path").first()).then(pl.lit("gone.mp4")).otherwise(pl.col("path"))
    batch = read(world, write_manifest(world, tmp_path / "gone.parquet", gone))
    assert [bad.row for bad in batch.bad] == [0] and len(batch.control_BCFHW) == len(batch.pixels_BCFHW) == 3


@pytest.mark.parametrize(
    ("control", "message"),
    [
        (pl.lit("../secret.mp4"), r"column 'control'.*leaves the root"),
        (pl.lit("/etc/passwd"), r"column 'control'.*is absolute"),
        (pl.lit("https://host/a.mp4"), r"column 'control'.*has a scheme"),
    ],
)
def test_control_paths_stay_below_the_root(world: Any, tmp_path: Path, control: pl.Expr, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_manifest(world, tmp_path / "bad.parquet", control)


def test_rows_without_a_control_clip_are_refused_before_reading(world: Any, tmp_path: Path) -> None:
    some = pl.when(pl.int_range(pl.len()) > 2).then(pl.col("path"))
    manifest = write_manifest(world, tmp_path / "some.parquet", some)
    with pytest.raises(DataError, match=r"3 of \d+ rows have no control clip.*control is not null"):
        read(world, manifest)
    plain = Manifest.read(world.shared / "data" / "manifest.parquet")
    with pytest.raises(DataError, match="no column 'control'"):
        read(world, plain)


def test_the_name_of_cogvideox_fun_is_understood(world: Any, tmp_path: Path) -> None:
    table = pl.read_parquet(world.shared / "data" / "manifest.parquet")
    table.with_columns(pl.col("path").alias("control_file_path")).write_parquet(tmp_path / "fun.parquet")
    manifest = Manifest.read(tmp_path / "fun.parquet", root=world.shared / "data")
    assert manifest.control_file(0) == manifest.file(0)
