"""What a reader takes from files: windows, crops with their coordinates, and images beside videos."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from frameloom.config.schema.data import DataSection, TransformSection
from frameloom.core.errors import DataError
from frameloom.data.buckets.policy import BucketPolicy, assign
from frameloom.data.loading.batch import Batch, BatchRequest
from frameloom.data.loading.reader import BatchReader, Stores
from frameloom.data.manifest.manifest import Manifest, write_manifest
from frameloom.data.media.decode import read_clip, read_image
from frameloom.data.media.frames import FrameRule
from frameloom.data.media.transforms import Transforms, parse_transforms
from frameloom.data.order.plan import plan_epoch
from tests.data.loading.plan_requests import read_plan

RANDOM_CROP = (TransformSection(name="resize", rounding="up"), TransformSection(name="random_crop"))
WIDE = 2  # c.mp4: 48 x 80, 12 frames, 24 fps


def request_for(grid: BucketPolicy, rows: Sequence[int], *, frames: int, height: int = 64, width: int = 64):
    bucket = next(b for b in grid.buckets if (b.frames, b.height, b.width) == (frames, height, width))
    return BatchRequest(0, 0, bucket.index, np.array(rows), np.arange(len(rows), dtype=np.int64))


def with_columns(clip_set: Path, folder: Path, **columns: list) -> Manifest:
    """The shared set with more columns, in a folder of its own."""
    shutil.copytree(clip_set.parent, folder)
    table = pl.read_parquet(clip_set).with_columns(**{name: pl.Series(values) for name, values in columns.items()})
    write_manifest(folder / "windows.parquet", table)
    return Manifest.read(folder / "windows.parquet")


def test_frames_come_from_the_window_of_the_row(clip_set: Path, tmp_path: Path, grid: BucketPolicy) -> None:
    num_rows = pl.read_parquet(clip_set).height
    starts = [None, 11, *[None] * (num_rows - 2)]
    ends = [None, 20, *[None] * (num_rows - 2)]
    frames = pl.read_parquet(clip_set)["frames"].to_list()
    frames[1] = 9
    cut = with_columns(clip_set, tmp_path / "cut", start_frame=starts, end_frame=ends, frames=frames)
    bucket = grid.buckets[request_for(grid, [1], frames=9).bucket]
    reader = BatchReader(cut, grid, seed=1, data=DataSection(frame_start="random"))
    whole = read_clip(cut.file(1), indices=range(20), height=64, width=64)
    assert torch.equal(reader.read_sample(1, bucket, 0, 0).pixels_CFHW, whole[:, 11:20])
    uncut = BatchReader(Manifest.read(clip_set), grid, seed=1, data=DataSection(frame_start="first"))
    assert torch.equal(uncut.read_sample(1, bucket, 0, 0).pixels_CFHW, whole[:, :9])


def test_the_policy_says_how_frames_are_spaced(manifest: Manifest, grid: BucketPolicy) -> None:
    bucket = grid.buckets[request_for(grid, [5], frames=9).bucket]
    whole = read_clip(manifest.file(5), indices=range(40), height=64, width=64)
    strided = pickle.loads(pickle.dumps(grid))
    object.__setattr__(strided, "frame_rule", FrameRule(stride=3))
    reader = BatchReader(manifest, strided, seed=1, data=DataSection(frame_start="first"))
    assert torch.equal(reader.read_sample(5, bucket, 0, 0).pixels_CFHW, whole[:, 0:27:3])
    slower = pickle.loads(pickle.dumps(grid))
    object.__setattr__(slower, "frame_rule", FrameRule(fps=48))
    reader = BatchReader(manifest, slower, seed=1, data=DataSection(frame_start="first"))
    assert torch.equal(reader.read_sample(5, bucket, 0, 0).pixels_CFHW, whole[:, [0, 0, 1, 1, 2, 2, 3, 3, 4]])


def test_crops_are_recorded_and_belong_to_the_pixels(manifest: Manifest, grid: BucketPolicy) -> None:
    reader = BatchReader(manifest, grid, seed=1, data=DataSection(frame_start="first", transforms=RANDOM_CROP))
    request = request_for(grid, [WIDE] * 6, frames=9)
    batch = reader.read(request)
    assert batch.crops is not None and batch.pixels_BCFHW is not None
    assert batch.crops.original_B2.tolist() == [[48, 80]] * 6
    assert batch.crops.target_B2.tolist() == [[64, 64]] * 6
    top_left = batch.crops.top_left_B2
    assert len(top_left[:, 1].unique()) > 2 and top_left[:, 0].unique().tolist() == [0]
    scaled_width = Transforms(parse_transforms(RANDOM_CROP)).place(48, 80, 64, 64).width
    whole = read_clip(manifest.file(WIDE), indices=range(9), height=64, width=scaled_width)
    for pixels, (_, left) in zip(batch.pixels_BCFHW, top_left.tolist(), strict=True):
        assert (pixels.int() - whole[:, :, :, left : left + 64].int()).abs().max() <= 1
    again = BatchReader(manifest, grid, seed=1, data=reader.data).read(request)
    assert torch.equal(again.crops.top_left_B2, top_left)
    other = BatchReader(manifest, grid, seed=2, data=reader.data).read(request)
    assert not torch.equal(other.crops.top_left_B2, top_left)


def test_a_mirrored_crop_has_the_coordinates_of_the_mirrored_source(manifest: Manifest, grid: BucketPolicy) -> None:
    settings = {"frame_start": "first", "transforms": RANDOM_CROP}
    request = request_for(grid, [WIDE] * 4, frames=9)
    plain = BatchReader(manifest, grid, seed=1, data=DataSection(**settings)).read(request)
    mirrored = BatchReader(manifest, grid, seed=1, data=DataSection(**settings, flip=1.0)).read(request)
    assert torch.equal(mirrored.pixels_BCFHW, plain.pixels_BCFHW.flip(-1))
    width = Transforms(parse_transforms(RANDOM_CROP)).place(48, 80, 64, 64).width
    assert torch.equal(mirrored.crops.top_left_B2[:, 1], width - 64 - plain.crops.top_left_B2[:, 1])


def test_without_random_crops_nothing_is_drawn_and_the_cut_is_the_centre(
    manifest: Manifest, grid: BucketPolicy
) -> None:
    reader = BatchReader(manifest, grid, seed=1, data=DataSection(frame_start="first"))
    batch = reader.read(request_for(grid, [WIDE, 0], frames=9))
    assert batch.crops.top_left_B2.tolist() == [[0, 21], [0, 0]]
    squashed = DataSection(frame_start="first", transforms=(TransformSection(fit="stretch"),))
    other = BatchReader(manifest, grid, seed=1, data=squashed).read(request_for(grid, [WIDE], frames=9))
    assert other.crops.top_left_B2.tolist() == [[0, 0]]
    assert not torch.equal(other.pixels_BCFHW[0], batch.pixels_BCFHW[0])


def joint_content(batch: Batch) -> tuple[object, ...]:
    assert batch.pixels_BCFHW is not None
    images = batch.images
    beside = None
    if images is not None:
        beside = (images.rows_BN.tolist(), images.captions, images.pixels_BCNHW.numpy().tobytes())
    return batch.index, batch.rows.tolist(), batch.pixels_BCFHW.numpy().tobytes(), beside, tuple(batch.bad)


def read_joint(manifest: Manifest, grid: BucketPolicy, *, seed: int = 1, **kwargs) -> list[tuple[object, ...]]:
    settings = DataSection(frame_start="random", use_image_num=3)
    plan = plan_epoch(assign(manifest, grid, 1, 0), grid.batch_sizes, grid.costs, seed=1, epoch=0)
    reader = BatchReader(manifest, grid, seed=seed, data=settings)
    return [joint_content(batch) for batch in read_plan(plan, reader, **kwargs)]


def test_images_beside_videos_do_not_depend_on_workers_or_position(manifest: Manifest, grid: BucketPolicy) -> None:
    alone = read_joint(manifest, grid)
    assert read_joint(manifest, grid, workers=2, timeout_s=60) == alone
    assert read_joint(manifest, grid, position=3) == alone[3:]
    other = read_joint(manifest, grid, seed=2)
    assert [item[3] for item in other] != [item[3] for item in alone]
    plan_images = [item[3] for item in alone if item[3] is not None]
    assert 0 < len(plan_images) < len(alone)  # batches of images have none beside them
    rows = {row for rows, *_ in plan_images for beside in rows for row in beside}
    assert rows <= {8, 9, 10} and len(rows) > 1


def test_an_image_beside_a_video_is_the_image_of_its_row_at_the_videos_size(
    manifest: Manifest, grid: BucketPolicy
) -> None:
    settings = DataSection(frame_start="first", use_image_num=2)
    batch = BatchReader(manifest, grid, seed=1, data=settings).read(request_for(grid, [0, 1], frames=9))
    images = batch.images
    assert images is not None and images.pixels_BCNHW.shape == (2, 3, 2, 64, 64)
    for sample in range(2):
        for number in range(2):
            row = int(images.rows_BN[sample, number])
            expected = read_image(manifest.file(row), height=64, width=64)[:, 0]
            assert torch.equal(images.pixels_BCNHW[sample, :, number], expected)
            assert images.captions[sample][number] == manifest.caption(row)


def test_images_can_be_frames_of_the_video(manifest: Manifest, grid: BucketPolicy) -> None:
    settings = DataSection(frame_start="first", use_image_num=4, use_img_from_vid=True)
    batch = BatchReader(manifest, grid, seed=1, data=settings).read(request_for(grid, [0, 1], frames=9))
    assert torch.equal(batch.images.pixels_BCNHW, batch.pixels_BCFHW[:, :, [0, 2, 5, 8]])
    assert batch.images.captions == [[caption] * 4 for caption in batch.captions]
    assert batch.images.rows_BN.tolist() == [[0] * 4, [1] * 4]
    without = BatchReader(manifest, grid, seed=1, data=DataSection(frame_start="first"))
    assert without.read(request_for(grid, [0, 1], frames=9)).images is None


class CountedText:
    """A text cache that gives the length of each caption."""

    def get(self, captions: list[str]) -> dict[str, torch.Tensor]:
        return {"lengths": torch.tensor([len(caption) for caption in captions])}


def test_captions_of_images_are_encoded_too(manifest: Manifest, grid: BucketPolicy) -> None:
    settings = DataSection(frame_start="first", use_image_num=2)
    reader = BatchReader(manifest, grid, seed=1, data=settings, stores=Stores(text=CountedText()))
    images = reader.read(request_for(grid, [0, 1], frames=9)).images
    flat = [len(caption) for beside in images.captions for caption in beside]
    assert images.text["lengths"].tolist() == flat


def test_a_bad_image_beside_a_video_is_replaced_and_listed(clip_set: Path, tmp_path: Path, grid: BucketPolicy) -> None:
    shutil.copytree(clip_set.parent, tmp_path / "set")
    manifest = Manifest.read(tmp_path / "set" / clip_set.name)
    (tmp_path / "set" / "i.png").write_text("no image")
    settings = DataSection(frame_start="first", use_image_num=6)
    batch = BatchReader(manifest, grid, seed=1, data=settings).read(request_for(grid, [0, 1], frames=9))
    assert 8 not in batch.images.rows_BN
    assert {clip.path for clip in batch.bad} == {"i.png"}
    for name in ("j.png", "k.png"):
        (tmp_path / "set" / name).unlink()
    with pytest.raises(DataError, match="images drawn to go beside a video could be read"):
        BatchReader(manifest, grid, seed=1, data=settings).read(request_for(grid, [0, 1], frames=9))
    videos = Manifest.read(tmp_path / "set" / clip_set.name, where={"kind": "video"})
    with pytest.raises(DataError, match="no row is an image"):
        BatchReader(videos, grid, seed=1, data=settings).read(request_for(grid, [0], frames=9))


def test_one_of_several_captions_is_drawn_anew_each_epoch(clip_set: Path, tmp_path: Path, grid: BucketPolicy) -> None:
    ways = ("plainly", "shortly", "at length")
    texts = [[f"clip {row} said {way}" for way in ways] for row in range(pl.read_parquet(clip_set).height)]
    manifest = with_columns(clip_set, tmp_path / "several", captions=texts)
    heard: dict[str, list[list[str]]] = {}
    for choice in ("first", "random"):
        reader = BatchReader(manifest, grid, seed=4, data=DataSection(caption_choice=choice))
        request = request_for(grid, [0, 1, 2], frames=1)
        heard[choice] = [reader.read(dataclasses.replace(request, epoch=epoch)).captions for epoch in range(6)]
        assert heard[choice][3] == reader.read(dataclasses.replace(request, epoch=3)).captions
    assert all(captions == [manifest.caption(row) for row in range(3)] for captions in heard["first"])
    assert all(caption in texts[row] for captions in heard["random"] for row, caption in enumerate(captions))
    assert len({captions[0] for captions in heard["random"]}) > 1
