"""Caches hold what the encoder gave, encode again exactly what changed, and never give what is stale or damaged."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.config.schema.data import CacheSection, DataSection, SourceSection, TransformSection
from frameloom.core.errors import CacheError, ConfigError
from frameloom.data.buckets.grid import build_grid
from frameloom.data.buckets.policy import BucketPolicy, Pairs, assign, possible_buckets
from frameloom.data.cache.encoding import LatentEncoder, TextEncoder
from frameloom.data.cache.filling import CacheJob, Filled, write_latent_cache, write_text_cache
from frameloom.data.cache.keys import latent_fingerprint, latent_items, text_fingerprint
from frameloom.data.cache.store import LatentStore, TextStore
from frameloom.data.loading.batch import Batch, BatchRequest
from frameloom.data.loading.loader import iterate_batches, read_requests
from frameloom.data.loading.reader import BatchReader, Stores
from frameloom.data.manifest.manifest import Manifest, write_manifest
from frameloom.data.media.decode import ClipError
from frameloom.data.media.writing import write_video
from frameloom.data.order.plan import plan_epoch
from tests.data.loading.plan_requests import read_plan


def center(**cache: Any) -> DataSection:
    return DataSection(frame_start="center", cache=CacheSection(**cache))


SETTINGS = center()
RANDOM_CROP = (TransformSection(name="resize"), TransformSection(name="random_crop"))
ENCODER = {"weights": "abc", "config": {"channels": 3, "tile": None}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def encode(pixels_BCFHW: Tensor) -> tuple[Tensor, Tensor | None]:
    """A stand-in for a VAE: 8 x 8 means and deviations of each frame."""
    scaled = pixels_BCFHW.float() / 127.5 - 1
    mean = F.avg_pool3d(scaled, (1, 8, 8))
    return mean, (F.avg_pool3d(scaled**2, (1, 8, 8)) - mean**2).clamp(min=0).sqrt()


@dataclass
class Maker:
    """Writes and opens one latent cache, and counts what is encoded."""

    folder: Path
    manifest: Manifest
    policy: BucketPolicy
    data: DataSection = SETTINGS
    made_with: dict[str, Any] = field(default_factory=lambda: ENCODER)
    seed: int = 0
    encode: Callable[[Tensor], tuple[Tensor, Tensor | None]] = encode
    pairs: Pairs | None = None
    workers: int = 0
    num_encoded: int = 0

    @property
    def fingerprint(self) -> dict[str, Any]:
        return latent_fingerprint(self.policy, self.data, encoder=self.made_with, seed=self.seed)

    @property
    def items(self) -> pl.DataFrame:
        return latent_items(self.manifest, self.policy, self.pairs or possible_buckets(self.manifest, self.policy))

    def write(self, **job: Any) -> Filled:
        reader = BatchReader(self.manifest, self.policy, seed=0, data=self.data)

        def counting(pixels: Tensor) -> tuple[Tensor, Tensor | None]:
            self.num_encoded += len(pixels)
            return self.encode(pixels)

        def read(requests: Iterator[BatchRequest]) -> Iterator[Batch]:
            return read_requests(requests, reader, workers=self.workers, timeout_s=120)

        cache = self.data.cache.model_copy(update={"group": 4})
        return write_latent_cache(
            self.folder,
            self.items,
            read_pixels=read,
            encoder=LatentEncoder(counting, DTYPES[cache.precision], cache.store, self.seed),
            fingerprint=self.fingerprint,
            section=cache,
            job=CacheJob(**job),
        )

    def open(self, **how: Any) -> LatentStore:
        return LatentStore.open(self.folder, self.fingerprint, self.items, **how)

    @property
    def num_items(self) -> int:
        return len(possible_buckets(self.manifest, self.policy).rows)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, manifest: Manifest, grid: BucketPolicy) -> Maker:
    maker = Maker(tmp_path_factory.mktemp("cache") / "latents", manifest, grid)
    maker.write()
    return maker


@pytest.fixture
def own(tmp_path: Path, clip_set: Path, grid: BucketPolicy) -> Maker:
    """A cache of a copy of the clips, which a test may change."""
    shutil.copytree(clip_set.parent, tmp_path / "clips")
    maker = Maker(tmp_path / "cache", Manifest.read(tmp_path / "clips" / clip_set.name), grid)
    maker.write()
    maker.num_encoded = 0
    return maker


def compare_all(maker: Maker, cache: LatentStore) -> None:
    """Every possible clip, in reverse order, against the encoder."""
    reader = BatchReader(maker.manifest, maker.policy, seed=0, data=maker.data)
    pairs = possible_buckets(maker.manifest, maker.policy)
    for index in np.unique(pairs.buckets):
        bucket = maker.policy.buckets[index]
        rows = pairs.rows[pairs.buckets == index][::-1]
        mean, std = cache.get(rows, bucket)
        pixels = [
            reader.read(BatchRequest(0, 0, int(index), rows[[i]], rows[[i]])).pixels_BCFHW for i in range(len(rows))
        ]
        wanted_mean, wanted_std = encode(torch.cat([clip for clip in pixels if clip is not None]))
        assert torch.equal(mean, wanted_mean)
        assert wanted_std is not None
        assert torch.equal(std, wanted_std)


def test_every_possible_clip_comes_back_as_encoded(made: Maker) -> None:
    cache = made.open()
    assert len(list(made.folder.glob("shards/*.safetensors"))) > 2
    assert len(list(made.folder.glob("index-*.parquet"))) == 1
    assert made.num_encoded == made.num_items
    compare_all(made, cache)
    compare_all(made, pickle.loads(pickle.dumps(cache)))


@pytest.mark.parametrize("workers", [0, 2])
def test_cached_batches_are_the_clips_of_the_plan(
    made: Maker, manifest: Manifest, grid: BucketPolicy, workers: int
) -> None:
    plan = plan_epoch(assign(manifest, grid, 3, 1), grid.batch_sizes, grid.costs, seed=3, epoch=1)
    direct = list(iterate_batches(plan, BatchReader(manifest, grid, seed=3, data=SETTINGS)))
    reader = BatchReader(manifest, grid, SETTINGS, 3, Stores(made.open()))
    cached = list(read_plan(plan, reader, workers=workers, timeout_s=120))
    assert len(direct) == len(cached) > 4
    for one, other in zip(direct, cached, strict=True):
        assert (one.epoch, one.index, one.bucket) == (other.epoch, other.index, other.bucket)
        assert one.captions == other.captions
        assert np.array_equal(one.rows, other.rows)
        assert np.array_equal(one.sample_indices, other.sample_indices)
        assert one.pixels_BCFHW is not None
        assert other.latents is not None
        assert torch.equal(other.latents[0], encode(one.pixels_BCFHW)[0])
        assert other.pixels_BCFHW is None


def test_dtype_is_kept_and_a_missing_deviation_is_zero(made: Maker, tmp_path: Path) -> None:
    maker = replace(
        made, folder=tmp_path / "c", data=center(precision="bf16"), encode=lambda pixels: (encode(pixels)[0], None)
    )
    maker.write()
    pairs = possible_buckets(made.manifest, made.policy)
    mean, std = maker.open().get(pairs.rows[:1], made.policy.buckets[pairs.buckets[0]])
    assert mean.dtype == std.dtype == torch.bfloat16
    assert not std.any()
    assert mean.any()


def test_a_stored_sample_follows_from_seed_and_clip_alone(made: Maker, tmp_path: Path) -> None:
    def sample(name: str, seed: int, rows: slice) -> Tensor:
        pairs = possible_buckets(made.manifest, made.policy)
        part = Pairs(pairs.rows[rows], pairs.buckets[rows])
        maker = replace(made, folder=tmp_path / name, pairs=part, data=center(store="sample"), seed=seed)
        maker.write()
        mean, std = maker.open().get(pairs.rows[3:4], made.policy.buckets[pairs.buckets[3]])
        assert not std.any()
        return mean

    drawn = sample("a", 5, slice(0, 6))
    assert torch.equal(drawn, sample("b", 5, slice(3, 5)))
    assert not torch.equal(drawn, sample("c", 6, slice(3, 5)))
    pairs = possible_buckets(made.manifest, made.policy)
    mean, std = made.open().get(pairs.rows[3:4], made.policy.buckets[pairs.buckets[3]])
    assert 0 < ((drawn - mean) / std.clamp(min=1e-6)).abs().max() < 6


OTHERS = [
    ({"made_with": ENCODER | {"weights": "xyz"}}, 'encoder.weights: wanted "xyz", cache has "abc"'),
    (
        {"made_with": {"weights": "abc", "config": {"channels": 3, "tile": 256}}},
        "encoder.config.tile: wanted 256, cache has null",
    ),
    ({"data": center(precision="bf16")}, 'dtype: wanted "bfloat16", cache has "float32"'),
    ({"data": DataSection(frame_start="first")}, 'transforms.frame_start: wanted "first", cache has "center"'),
    ({"data": center(store="sample"), "seed": 3}, 'store.kind: wanted "sample", cache has "moments"'),
]


@pytest.mark.parametrize(("changes", "line"), OTHERS)
def test_stale_cache_is_refused_with_the_difference(made: Maker, changes: dict, line: str) -> None:
    with pytest.raises(CacheError) as caught:
        replace(made, **changes).open()
    assert f"lacks {made.num_items} of {made.num_items} latents" in str(caught.value)
    assert line in str(caught.value)
    assert "frameloom data cache" in str(caught.value)


def test_another_encoder_encodes_all_and_pruning_leaves_only_it(own: Maker) -> None:
    other = replace(own, **OTHERS[0][0])
    assert other.write() == Filled(own.num_items, own.num_items)
    own.open()
    other.open()
    assert other.write(prune=True) == Filled(own.num_items, 0, 0, own.num_items)
    compare_all(other, other.open())
    with pytest.raises(CacheError, match="made for something else"):
        own.open()
    assert own.write().num_encoded == own.num_items


def test_batch_sizes_and_chances_do_not_make_a_cache_stale(made: Maker) -> None:
    other = build_grid({"64px": {1: [0.1, 7], 9: [0.5, 3], 17: [0.9, 1]}}, stride=16, fps_max=24)
    replace(made, policy=other).open()


def test_a_new_bucket_encodes_only_its_own_clips(own: Maker) -> None:
    wider = build_grid({"64px": {1: [1.0, 2], 5: [1.0, 2], 9: [[1.0, 0.5], 2], 17: [0.5, 2]}}, stride=16, fps_max=24)
    more = replace(own, policy=wider)
    new = {tuple(row) for row in more.items.select("path", "frames", "height").rows()} - {
        tuple(row) for row in own.items.select("path", "frames", "height").rows()
    }
    with pytest.raises(CacheError, match=f"lacks {len(new)} of"):
        more.open()
    assert more.write().num_encoded == len(new) > 0
    compare_all(more, more.open())


def test_another_frame_rate_encodes_only_the_clips_it_thins(own: Maker) -> None:
    short = {"64px": {1: [1.0, 2], 9: [1.0, 2]}}
    replace(own, policy=build_grid(short, stride=16, fps_max=24)).write()
    changed = replace(own, policy=build_grid(short, stride=16, fps_max=48))
    # Only d.mp4 has 48 frames per second.
    num_new = changed.items.filter(pl.col("path") == "d.mp4").height
    with pytest.raises(CacheError, match=r"d\.mp4: interval: wanted 1, cache has 2"):
        changed.open()
    assert changed.write().num_encoded == num_new > 0


def test_a_changed_caption_encodes_no_latent_and_a_changed_length_its_own(own: Maker) -> None:
    table = pl.read_parquet(own.manifest.source)
    changed = table.with_columns(pl.lit("another caption").alias("caption"))
    write_manifest(Path(own.manifest.source), changed)
    own.manifest = Manifest.read(Path(own.manifest.source))
    assert own.write().num_encoded == 0
    own.open()
    shorter = changed.with_columns(pl.when(pl.col("path") == "f.mp4").then(38).otherwise("frames").alias("frames"))
    write_manifest(Path(own.manifest.source), shorter)
    own.manifest = Manifest.read(Path(own.manifest.source))
    with pytest.raises(CacheError, match=r"f\.mp4: frames: wanted 38, cache has 40"):
        own.open()
    num_new = own.items.filter(pl.col("path") == "f.mp4").height
    assert own.write().num_encoded == own.num_encoded == num_new > 0


def test_rows_may_move_and_files_may_be_touched_or_deleted(own: Maker) -> None:
    table = pl.read_parquet(own.manifest.source)
    write_manifest(Path(own.manifest.source), table.reverse())
    own.manifest = Manifest.read(Path(own.manifest.source))
    os.utime(own.manifest.root / "a.mp4", (1, 1))
    compare_all(own, own.open())
    # The content of a touched file is worked out once and kept.
    (known,) = own.folder.glob("files-*.parquet")
    before = known.stat().st_mtime_ns
    own.open()
    assert known.stat().st_mtime_ns == before
    (own.manifest.root / "a.mp4").unlink()
    own.open()
    assert own.write().num_encoded == own.num_encoded == 0


def test_a_changed_file_is_refused_and_encoded_again_alone(own: Maker) -> None:
    pixels = np.full((12, 64, 64, 3), 7, dtype=np.uint8)
    write_video(own.manifest.root / "a.mp4", pixels, 24, preset="ultrafast")
    with pytest.raises(CacheError, match=r"a\.mp4: file: wanted \d+ bytes of .* UTC, cache has \d+ bytes of"):
        own.open()
    own.open(check_files=False)
    num_new = own.items.filter(pl.col("path") == "a.mp4").height
    assert own.write().num_encoded == own.num_encoded == num_new > 0
    compare_all(own, own.open())
    assert own.write(prune=True).num_pruned == num_new
    compare_all(own, own.open())


def test_a_repaired_clip_is_encoded(own: Maker) -> None:
    good = (own.manifest.root / "c.mp4").read_bytes()
    (own.manifest.root / "c.mp4").write_text("not a video")
    filled = own.write()
    assert filled.num_unreadable == filled.num_encoded > 0
    assert set(own.open().bad) == {2}
    (own.manifest.root / "c.mp4").write_bytes(good)
    # The first latents are there still, and the content tells that they are right.
    assert own.write().num_encoded == 0
    compare_all(own, own.open())


def read_first(maker: Maker) -> Tensor:
    """All latents of a.mp4."""
    cache, items = maker.open(), maker.items.filter(pl.col("path") == "a.mp4")
    buckets = [maker.policy.buckets[number] for number in items["bucket"]]
    return torch.cat([cache.get(np.array([0]), bucket)[0].flatten() for bucket in buckets])


@pytest.mark.parametrize("has_index", [True, False])
def test_of_a_deleted_file_the_latents_of_its_last_version_count(own: Maker, has_index: bool) -> None:
    path = own.manifest.root / "a.mp4"
    for version in range(5):
        write_video(path, np.full((12, 64, 64, 3), 50 * version, dtype=np.uint8), 24, preset="ultrafast")
        os.utime(path, (1000 - version, 1000 - version))  # a copy of an older file is newer nevertheless
        own.write()
        if not has_index:
            for index in own.folder.glob("index-*.parquet"):
                index.unlink()
        right, content = read_first(own), path.read_bytes()
        path.unlink()
        assert torch.equal(read_first(own), right)
        path.write_bytes(content)


def test_a_file_that_is_deleted_after_it_went_back_has_its_old_latents(own: Maker) -> None:
    path = own.manifest.root / "a.mp4"
    right, content = read_first(own), path.read_bytes()
    write_video(path, np.full((12, 64, 64, 3), 7, dtype=np.uint8), 24, preset="ultrafast")
    own.write()
    assert not torch.equal(read_first(own), right)
    path.write_bytes(content)
    assert own.write().num_encoded == 0
    path.unlink()
    assert torch.equal(read_first(own), right)


@pytest.mark.parametrize("is_repaired", [True, False])
def test_latents_of_a_deleted_file_count_more_than_a_broken_version_of_it(own: Maker, is_repaired: bool) -> None:
    path = own.manifest.root / "a.mp4"
    good = path.read_bytes()
    own.folder = own.folder.with_name("other")
    for content in (b"not a video", good) if is_repaired else (good, b"not a video"):
        path.write_bytes(content)
        own.write()
    path.unlink()
    assert not own.open().bad and own.write().num_encoded == 0


def test_cache_that_lacks_clips_is_refused(made: Maker, tmp_path: Path) -> None:
    pairs = possible_buckets(made.manifest, made.policy)
    part = replace(made, folder=tmp_path / "c", pairs=Pairs(pairs.rows[3:], pairs.buckets[3:]))
    part.write()
    cache = part.open()
    with pytest.raises(CacheError, match=f"lacks 3 of {len(pairs.rows)} latents"):
        replace(part, pairs=None).open()
    with pytest.raises(CacheError, match="no latent for rows"):
        cache.get(pairs.rows[:1], made.policy.buckets[pairs.buckets[0]])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (DataSection(frame_start="random"), "frame_start"),
        (DataSection(frame_start="center", flip=0.5), "flip"),
        (DataSection(frame_start="center", transforms=RANDOM_CROP), "transforms"),
        (DataSection(frame_start="center", use_image_num=2), "use_image_num"),
    ],
)
def test_random_settings_are_refused_by_name(made: Maker, settings: DataSection, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: .* cannot be cached"):
        _ = replace(made, data=settings).fingerprint


def test_sources_with_the_same_paths_are_distinct(tmp_path: Path, grid: BucketPolicy) -> None:
    for name, value in (("one", 40), ("two", 200)):
        pixels = np.full((12, 64, 64, 3), value, dtype=np.uint8)
        (tmp_path / name).mkdir()
        write_video(tmp_path / name / "a.mp4", pixels, 24, preset="ultrafast")
        facts = {"path": "a.mp4", "caption": "", "kind": "video", "height": 64, "width": 64, "frames": 12, "fps": 24.0}
        write_manifest(tmp_path / name / "m.parquet", pl.DataFrame([facts]))
    both = Manifest.read_sources([SourceSection(path=str(tmp_path / name / "m.parquet")) for name in ("one", "two")])
    maker = Maker(tmp_path / "c", both, grid)
    assert maker.write().num_encoded == 2
    cache = maker.open(check_files=False)
    bucket = grid.buckets[possible_buckets(both, grid).buckets[0]]
    assert cache.get(np.array([0]), bucket)[0].mean() < 0 < cache.get(np.array([1]), bucket)[0].mean()
    compare_all(maker, maker.open())


class Stop(Exception):
    """Ends a writer in the middle."""


@pytest.mark.parametrize("num_clips", [0, 1, 5, 9])
def test_an_interrupted_writer_loses_at_most_one_group(made: Maker, tmp_path: Path, num_clips: int) -> None:
    def encode_some(pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        if maker.num_encoded > num_clips:
            raise Stop
        return encode(pixels)

    maker = replace(made, folder=tmp_path / "c", encode=encode_some, num_encoded=0)
    with pytest.raises(Stop):
        maker.write()
    with pytest.raises(CacheError, match=f"lacks {maker.num_items - num_clips // 4 * 4} of {maker.num_items}"):
        maker.open()
    rest = replace(maker, encode=encode, num_encoded=0)
    assert rest.write().num_encoded == rest.num_encoded == maker.num_items - num_clips // 4 * 4
    compare_all(rest, rest.open())
    shards = {path.name for path in maker.folder.glob("shards/*")}
    assert shards == {path.name for path in made.folder.glob("shards/*")}
    assert rest.write().num_encoded == 0


def test_ranks_share_the_work_and_write_what_one_process_writes(made: Maker, tmp_path: Path) -> None:
    maker = replace(made, folder=tmp_path / "c", num_encoded=0)
    shares = [maker.write(rank=rank, num_ranks=3).num_encoded for rank in range(3)]
    assert sum(shares) == maker.num_encoded == maker.num_items
    assert min(shares) > 0
    compare_all(maker, maker.open())
    assert {path.name for path in maker.folder.glob("shards/*")} == {path.name for path in made.folder.glob("shards/*")}


def test_folder_of_other_things_is_never_written_over(made: Maker, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(CacheError, match="not empty and not a cache"):
        replace(made, folder=tmp_path / "mine").write()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    with pytest.raises(CacheError, match="a cache of latents, wanted one of text"):
        TextStore.open(made.folder, TEXT)


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


def shards_of(maker: Maker) -> list[Path]:
    return sorted(maker.folder.glob("shards/*.safetensors"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "cut short, too long or missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "cut short, too long or missing"),
        (flip_byte, "is damaged"),
    ],
)
def test_a_damaged_shard_is_noticed_and_only_its_group_encoded_again(
    own: Maker, damage: Callable[[Path], object], message: str
) -> None:
    shard = shards_of(own)[1]
    before = {path: path.read_bytes() for path in shards_of(own)}
    times = {path: path.stat().st_mtime_ns for path in shards_of(own)}
    damage(shard)
    with pytest.raises(CacheError, match=f"{shard.name}.*{message}"):
        compare_all(own, own.open())
    assert 0 < own.write().num_encoded <= 4
    assert {path: path.read_bytes() for path in shards_of(own)} == before
    assert {path for path in times if path.stat().st_mtime_ns != times[path]} == {shard}
    compare_all(own, own.open())


def test_sizes_alone_do_not_show_a_flipped_bit(own: Maker) -> None:
    flip_byte(shards_of(own)[1])
    assert own.write(verify=False).num_encoded == 0
    assert own.write(verify=True).num_encoded > 0


def test_damaged_records_count_as_missing(own: Maker) -> None:
    group = sorted(own.folder.glob("groups/*.parquet"))[0]
    flip_byte(group)
    # The merged index still has its entries; only when that goes too are they lost.
    own.open()
    flip_byte(next(own.folder.glob("index-*.parquet")))
    with pytest.raises(CacheError, match=r"lacks [1-4] of"):
        own.open()
    assert 0 < own.write().num_encoded <= 4
    compare_all(own, own.open())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cache.json: not JSON"),
        (None, "no cache here"),
        (json.dumps({"format": 1}), "cache format 1, this version"),
    ],
)
def test_what_is_no_cache_of_this_format_is_refused(own: Maker, text: str | None, message: str) -> None:
    (own.folder / "cache.json").unlink() if text is None else (own.folder / "cache.json").write_text(text)
    with pytest.raises(CacheError, match=message):
        own.open()


def test_bad_clips_are_kept_with_their_reason_and_replaced(tmp_path: Path, clip_set: Path, grid: BucketPolicy) -> None:
    root = tmp_path / "damaged"
    shutil.copytree(clip_set.parent, root)
    (root / "a.mp4").write_text("not a video")
    (root / "j.png").unlink()
    manifest = Manifest.read(root / clip_set.name)
    maker = Maker(tmp_path / "c", manifest, grid)
    maker.write()
    cache = maker.open()
    assert {manifest.clip(row).path for row in cache.bad} == {"a.mp4", "j.png"}
    pairs = possible_buckets(manifest, grid)
    with pytest.raises(ClipError, match=r"a\.mp4"):
        cache.check(0, grid.buckets[pairs.buckets[pairs.rows == 0][0]])
    plan = plan_epoch(assign(manifest, grid, 3, 0), grid.batch_sizes, grid.costs, seed=3, epoch=0)
    direct = BatchReader(manifest, grid, seed=3, data=DataSection(frame_start="center"))
    cached = BatchReader(manifest, grid, SETTINGS, 3, Stores(cache))
    for one, other in zip(iterate_batches(plan, direct), iterate_batches(plan, cached), strict=True):
        assert np.array_equal(one.rows, other.rows)
        assert [(clip.row, clip.ordinal, clip.reason) for clip in one.bad] == [
            (clip.row, clip.ordinal, clip.reason) for clip in other.bad
        ]


def test_latents_that_are_not_finite_are_refused(made: Maker, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="not finite"):
        replace(made, folder=tmp_path / "c", encode=lambda pixels: (encode(pixels)[0] / 0, None)).write()


def test_pruning_is_refused_while_a_reader_is_open(own: Maker) -> None:
    cache = own.open()
    with pytest.raises(CacheError, match="in use by another process"):
        own.write(prune=True)
    del cache
    assert own.write(prune=True).num_pruned == 0


CAPTIONS = ["a red circle", "ein grüner Kreis", "a red circle", "x" * 5000]
TEXT = text_fingerprint(CacheSection(), encoder={"weights": "abc"})


def encode_text(captions: list[str]) -> dict[str, Tensor]:
    """Padded to 12 words: states and a mask that end with the caption, and a pooled vector."""
    tokens, mask = torch.zeros(len(captions), 12, 3), torch.zeros(len(captions), 12, dtype=torch.bool)
    for place, text in enumerate(captions):
        for number, word in enumerate(text.split()):
            tokens[place, number] = torch.tensor([len(word), -0.0, sum(word.encode()) % 1000 / 7])
            mask[place, number] = True
    return {"tokens_BKD": tokens, "mask_BK": mask, "pooled_BD": tokens.sum(1)}


def write_text(folder: Path, captions: list[str] = CAPTIONS, *, group: int = 2, **job: Any) -> Filled:
    encoder, section = TextEncoder(encode_text, torch.float32), CacheSection(group=group)
    return write_text_cache(folder, captions, encoder=encoder, fingerprint=TEXT, section=section, job=CacheJob(**job))


def test_captions_come_back_as_encoded_with_the_null_prompt(tmp_path: Path) -> None:
    assert write_text(tmp_path / "t") == Filled(4, 4)
    cache = TextStore.open(tmp_path / "t", TEXT, captions=CAPTIONS)
    asked = ["", "ein grüner Kreis", "a red circle", "a red circle"]
    found, wanted = cache.get(asked), encode_text(asked)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype
        assert torch.equal(found[name].view(torch.uint8), wanted[name].view(torch.uint8))
    assert not torch.equal(found["tokens_BKD"], encode_text(asked[::-1])["tokens_BKD"])
    copy = pickle.loads(pickle.dumps(cache))
    assert torch.equal(copy.get(asked)["tokens_BKD"], wanted["tokens_BKD"])


def test_padding_is_not_stored(tmp_path: Path) -> None:
    write_text(tmp_path / "t", [f"word {n}" for n in range(50)], group=100)
    (shard,) = (tmp_path / "t" / "shards").iterdir()
    padded = sum(part.numel() * part.element_size() for part in encode_text(["x"] * 51).values())
    assert shard.stat().st_size < padded


def test_a_changed_caption_is_encoded_alone(tmp_path: Path) -> None:
    write_text(tmp_path / "t")
    changed = [*CAPTIONS[1:], "a blue circle"]
    with pytest.raises(CacheError, match="no embedding for 1 of 5 captions, first 'a blue circle'; encode again with"):
        TextStore.open(tmp_path / "t", TEXT, captions=changed)
    assert write_text(tmp_path / "t", changed).num_encoded == 1
    TextStore.open(tmp_path / "t", TEXT, captions=changed)
    assert write_text(tmp_path / "t", ["a blue circle"], prune=True).num_pruned == 3
    kept = TextStore.open(tmp_path / "t", TEXT, captions=["a blue circle"])
    assert torch.equal(kept.get(["a blue circle"])["tokens_BKD"], encode_text(["a blue circle"])["tokens_BKD"])
    with pytest.raises(CacheError, match="no embedding for 1 captions, first 'a red circle'"):
        kept.get(["a red circle"])


def test_another_text_encoder_is_refused_with_the_difference(tmp_path: Path) -> None:
    write_text(tmp_path / "t")
    other = text_fingerprint(CacheSection(), encoder={"weights": "xyz"})
    with pytest.raises(CacheError, match=r'encoder.weights: wanted "xyz", cache has "abc"'):
        TextStore.open(tmp_path / "t", other, captions=CAPTIONS)


def test_batches_carry_cached_text(tmp_path: Path, manifest: Manifest, grid: BucketPolicy) -> None:
    captions = manifest.captions(range(len(manifest)))
    write_text(tmp_path / "t", captions)
    text = TextStore.open(tmp_path / "t", TEXT, captions=captions)
    plan = plan_epoch(assign(manifest, grid, 1, 0), grid.batch_sizes, grid.costs, seed=1, epoch=0)
    batch = next(iterate_batches(plan, BatchReader(manifest, grid, SETTINGS, 1, Stores(text=text))))
    assert batch.text is not None
    assert torch.equal(batch.text["tokens_BKD"], encode_text(batch.captions)["tokens_BKD"])
