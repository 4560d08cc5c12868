"""Caches hold what the encoder gave, refuse what they were not made for, and survive interruptions."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.core.errors import CacheError, ConfigError
from frameloom.data.buckets import Pairs, assign, possible_buckets
from frameloom.data.cache import (
    LatentCache,
    TextCache,
    latent_fingerprint,
    text_fingerprint,
    write_latent_cache,
    write_text_cache,
)
from frameloom.data.decode import ClipError
from frameloom.data.grid import GridConfig, parse_grid
from frameloom.data.loader import iterate_batches, read_requests
from frameloom.data.manifest import Manifest
from frameloom.data.plan import plan_epoch
from frameloom.data.reader import CachedReader, ClipReader, ReadSettings

SETTINGS = ReadSettings(frame_start="center", max_replacements=0)
ENCODER = {"weights": "abc", "config": {"channels": 3, "tile": None}}
DTYPE = torch.float32
ROOT = Path(__file__).parents[2]


def encode(pixels_BCFHW: Tensor) -> tuple[Tensor, Tensor | None]:
    """A stand-in for a VAE: 8 x 8 means and deviations of each frame."""
    scaled = pixels_BCFHW.float() / 127.5 - 1
    mean = F.avg_pool3d(scaled, (1, 8, 8))
    return mean, (F.avg_pool3d(scaled**2, (1, 8, 8)) - mean**2).clamp(min=0).sqrt()


def fingerprint(manifest: Manifest, grid: GridConfig, /, **changes: Any) -> dict[str, Any]:
    given = {"manifest": manifest, "grid": grid, "settings": SETTINGS, "encoder": ENCODER, "dtype": DTYPE}
    return latent_fingerprint(**(given | changes))


def write(
    folder: Path,
    manifest: Manifest,
    grid: GridConfig,
    *,
    encode: Callable[[Tensor], tuple[Tensor, Tensor | None]] = encode,
    workers: int = 0,
    dtype: torch.dtype = DTYPE,
    pairs: Pairs | None = None,
) -> None:
    reader = ClipReader(manifest, grid, seed=0, settings=SETTINGS)
    write_latent_cache(
        folder,
        pairs or possible_buckets(manifest, grid),
        buckets=grid.buckets,
        read_pixels=lambda requests: read_requests(requests, reader, workers=workers, timeout_s=120),
        encode=encode,
        fingerprint=fingerprint(manifest, grid, dtype=dtype),
        dtype=dtype,
        shard_bytes=40_000,
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory, manifest: Manifest, grid: GridConfig) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "latents"
    write(folder, manifest, grid)
    return folder


@pytest.mark.parametrize("memory_bytes", [0, 2**30])
def test_every_possible_clip_comes_back_as_encoded(
    latents: Path, manifest: Manifest, grid: GridConfig, memory_bytes: int
) -> None:
    cache = LatentCache.open(
        latents, fingerprint(manifest, grid), pairs=possible_buckets(manifest, grid), memory_bytes=memory_bytes
    )
    assert len(list(latents.glob("shard-*.safetensors"))) > 2
    reader = ClipReader(manifest, grid, seed=0, settings=SETTINGS)
    pairs = possible_buckets(manifest, grid)
    for index in np.unique(pairs.buckets):
        bucket = grid.buckets[index]
        rows = pairs.rows[pairs.buckets == index][::-1]
        mean, std = cache.get(rows, bucket)
        pixels = torch.stack([reader.read_pixels(int(row), bucket, 0, 0) for row in rows])
        wanted_mean, wanted_std = encode(pixels)
        assert torch.equal(mean, wanted_mean)
        assert wanted_std is not None
        assert torch.equal(std, wanted_std)


@pytest.mark.parametrize("workers", [0, 2])
def test_cached_batches_are_the_clips_of_the_plan(
    latents: Path, manifest: Manifest, grid: GridConfig, workers: int
) -> None:
    cache = LatentCache.open(latents, fingerprint(manifest, grid))
    plan = plan_epoch(assign(manifest, grid, 3, 1), grid.batch_sizes, grid.costs, seed=3, epoch=1)
    direct = list(iterate_batches(plan, ClipReader(manifest, grid, seed=3, settings=SETTINGS)))
    cached = list(iterate_batches(plan, CachedReader(manifest, grid, cache, seed=3), workers=workers, timeout_s=120))
    assert len(direct) == len(cached) > 4
    for one, other in zip(direct, cached, strict=True):
        assert (one.epoch, one.index, one.bucket, one.captions) == (
            other.epoch,
            other.index,
            other.bucket,
            other.captions,
        )
        assert np.array_equal(one.rows, other.rows)
        assert np.array_equal(one.ordinals, other.ordinals)
        assert one.pixels_BCFHW is not None
        assert other.latents is not None
        assert torch.equal(other.latents[0], encode(one.pixels_BCFHW)[0])
        assert other.pixels_BCFHW is None


def test_dtype_is_kept_and_a_missing_deviation_is_zero(tmp_path: Path, manifest: Manifest, grid: GridConfig) -> None:
    write(tmp_path / "c", manifest, grid, encode=lambda pixels: (encode(pixels)[0], None), dtype=torch.bfloat16)
    cache = LatentCache.open(tmp_path / "c", fingerprint(manifest, grid, dtype=torch.bfloat16))
    pairs = possible_buckets(manifest, grid)
    mean, std = cache.get(pairs.rows[:1], grid.buckets[pairs.buckets[0]])
    assert mean.dtype == std.dtype == torch.bfloat16
    assert not std.any()
    assert mean.any()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"encoder": {"weights": "xyz", "config": {"channels": 3, "tile": None}}},
            'encoder.weights: wanted "xyz", cache has "abc"',
        ),
        (
            {"encoder": {"weights": "abc", "config": {"channels": 3, "tile": 256}}},
            "encoder.config.tile: wanted 256, cache has null",
        ),
        ({"dtype": torch.bfloat16}, 'dtype: wanted "bfloat16", cache has "float32"'),
        ({"settings": ReadSettings(frame_start="first")}, 'transforms.frame_start: wanted "first", cache has "center"'),
        (
            {"grid": parse_grid({"64px": {1: [1.0, 2]}}, stride=16, fps_max=30)},
            "buckets.fps_max: wanted 30, cache has 24",
        ),
    ],
)
def test_stale_cache_is_refused_with_the_difference(
    latents: Path, manifest: Manifest, grid: GridConfig, changes: dict, line: str
) -> None:
    with pytest.raises(CacheError) as caught:
        LatentCache.open(latents, fingerprint(manifest, grid, **changes))
    assert line in str(caught.value)
    assert "frameloom data cache" in str(caught.value)


def test_changed_manifest_makes_a_cache_stale(
    latents: Path, clip_set: Path, manifest: Manifest, grid: GridConfig
) -> None:
    other = Manifest.read(clip_set, where={"kind": "video"})
    with pytest.raises(CacheError, match="manifest: wanted"):
        LatentCache.open(latents, fingerprint(other, grid))


def test_batch_sizes_and_chances_do_not_make_a_cache_stale(latents: Path, manifest: Manifest) -> None:
    other = parse_grid({"64px": {1: [0.1, 7], 9: [0.5, 3], 17: [0.9, 1]}}, stride=16, fps_max=24)
    LatentCache.open(latents, fingerprint(manifest, other))


def test_cache_that_lacks_clips_is_refused(tmp_path: Path, manifest: Manifest, grid: GridConfig) -> None:
    pairs = possible_buckets(manifest, grid)
    write(tmp_path / "c", manifest, grid, pairs=Pairs(pairs.rows[3:], pairs.buckets[3:]))
    cache = LatentCache.open(tmp_path / "c", fingerprint(manifest, grid))
    with pytest.raises(CacheError, match=f"lacks 3 of {len(pairs.rows)} clips"):
        LatentCache.open(tmp_path / "c", fingerprint(manifest, grid), pairs=pairs)
    with pytest.raises(CacheError, match="no latent for rows"):
        cache.get(pairs.rows[:1], grid.buckets[pairs.buckets[0]])


@pytest.mark.parametrize(
    ("settings", "name"),
    [(ReadSettings(frame_start="random"), "frame_start"), (ReadSettings("center", 0.5), "flip_probability")],
)
def test_random_settings_are_refused_by_name(
    manifest: Manifest, grid: GridConfig, settings: ReadSettings, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name}: .* cannot be cached"):
        fingerprint(manifest, grid, settings=settings)


class Stop(Exception):
    """Ends a writer in the middle."""


@pytest.mark.parametrize("num_batches", [0, 1, 3, 6])
def test_interrupted_cache_is_refused_and_then_finished(
    tmp_path: Path, latents: Path, manifest: Manifest, grid: GridConfig, num_batches: int
) -> None:
    calls: list[int] = []

    def encode_some(pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        calls.append(len(pixels))
        if len(calls) > num_batches:
            raise Stop
        return encode(pixels)

    folder = tmp_path / "c"
    with pytest.raises(Stop):
        write(folder, manifest, grid, encode=encode_some)
    with pytest.raises(CacheError, match="unfinished"):
        LatentCache.open(folder, fingerprint(manifest, grid))
    calls.clear()

    def encode_rest(pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        calls.append(len(pixels))
        return encode(pixels)

    write(folder, manifest, grid, encode=encode_rest)
    assert files_of(folder) == files_of(latents)
    assert 0 < sum(calls) <= len(possible_buckets(manifest, grid).rows)
    calls.clear()
    write(folder, manifest, grid, encode=encode_rest)
    assert calls == []


def test_finished_shards_are_kept_after_an_interruption(tmp_path: Path, manifest: Manifest, grid: GridConfig) -> None:
    calls: list[int] = []

    def encode_some(pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        calls.append(1)
        if len(calls) == 6:
            raise Stop
        return encode(pixels)

    with pytest.raises(Stop):
        write(tmp_path / "c", manifest, grid, encode=encode_some)
    num_done = len(list((tmp_path / "c").glob("*.done.json")))
    assert num_done > 0
    first = (tmp_path / "c" / "shard-00000.safetensors").stat().st_mtime_ns
    write(tmp_path / "c", manifest, grid, encode=lambda pixels: (calls.append(1), encode(pixels))[1])
    assert (tmp_path / "c" / "shard-00000.safetensors").stat().st_mtime_ns == first
    assert len(calls) < 6 + len(possible_buckets(manifest, grid).rows)


KILLED_WRITER = """
import sys, time
from pathlib import Path
import torch
from frameloom.data.cache import write_text_cache

def encode(captions):
    time.sleep(0.02)
    lengths = torch.tensor([len(caption) for caption in captions])
    return {"embedding": lengths[:, None].repeat(1, 256).float(), "mask": lengths > 20}

def write(folder):
    captions = [f"caption {'x' * n}" for n in range(80)]
    settings = dict(fingerprint={"kind": "text"}, dtype=torch.float32, batch_size=2, shard_bytes=8000)
    write_text_cache(Path(folder), captions, encode=encode, **settings)

if __name__ == "__main__":
    write(sys.argv[1])
"""


@pytest.mark.slow
def test_killed_writer_leaves_a_cache_that_can_be_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "killed_writer.py").write_text(KILLED_WRITER)
    command = [sys.executable, str(tmp_path / "killed_writer.py"), str(tmp_path / "c")]
    writer = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)})
    deadline_s = time.monotonic() + 60
    while len(list((tmp_path / "c").glob("*.done.json"))) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL
    with pytest.raises(CacheError, match=r"unfinished, \d+ shards are done"):
        TextCache.open(tmp_path / "c", {"kind": "text"})
    monkeypatch.syspath_prepend(tmp_path)
    write_again = __import__("killed_writer").write
    write_again(tmp_path / "c")
    write_again(tmp_path / "whole")
    assert files_of(tmp_path / "c") == files_of(tmp_path / "whole")
    assert TextCache.open(tmp_path / "c", {"kind": "text"}).get(["caption xx", ""])["embedding"][:, 0].tolist() == [
        10,
        0,
    ]


def test_folder_of_other_things_is_never_written_over(
    tmp_path: Path, latents: Path, manifest: Manifest, grid: GridConfig
) -> None:
    before = files_of(latents)
    with pytest.raises(CacheError, match="finished cache of other things"):
        write(latents, manifest, grid, dtype=torch.float16)
    assert files_of(latents) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(CacheError, match="not empty and not a cache"):
        write(tmp_path / "mine", manifest, grid)


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "shard-00001.safetensors").unlink(), "shard-00001.safetensors: is missing"),
        (lambda folder: (folder / "shard-00001.safetensors").write_bytes(b"x"), "has 1 bytes instead of"),
        (lambda folder: flip_byte(folder / "shard-00001.safetensors"), "shard-00001.safetensors: damaged"),
        (lambda folder: flip_byte(folder / "index.parquet"), r"index.parquet: missing or damaged"),
        (lambda folder: (folder / "cache.json").write_text("{"), "cache.json: damaged"),
        (lambda folder: (folder / "cache.json").unlink(), "no cache here"),
        (
            lambda folder: (folder / "cache.json").write_text(
                json.dumps(json.loads((folder / "cache.json").read_text()) | {"format": 99})
            ),
            "cache format 99",
        ),
    ],
)
def test_damaged_cache_is_refused(
    tmp_path: Path,
    latents: Path,
    manifest: Manifest,
    grid: GridConfig,
    damage: Callable[[Path], object],
    message: str,
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(latents, folder)
    LatentCache.open(folder, fingerprint(manifest, grid))
    damage(folder)
    with pytest.raises(CacheError, match=message):
        LatentCache.open(folder, fingerprint(manifest, grid))


def test_bad_clips_are_kept_with_their_reason_and_replaced(tmp_path: Path, clip_set: Path, grid: GridConfig) -> None:
    root = tmp_path / "damaged"
    shutil.copytree(clip_set.parent, root)
    (root / "a.mp4").write_text("not a video")
    (root / "j.png").unlink()
    manifest = Manifest.read(root / clip_set.name)
    write(tmp_path / "c", manifest, grid)
    cache = LatentCache.open(tmp_path / "c", fingerprint(manifest, grid), pairs=possible_buckets(manifest, grid))
    assert {manifest.clip(row).path for row in cache.bad} == {"a.mp4", "j.png"}
    pairs = possible_buckets(manifest, grid)
    bucket = grid.buckets[pairs.buckets[pairs.rows == 0][0]]
    with pytest.raises(ClipError, match=r"a\.mp4"):
        cache.check(0, bucket)
    plan = plan_epoch(assign(manifest, grid, 3, 0), grid.batch_sizes, grid.costs, seed=3, epoch=0)
    direct = ClipReader(manifest, grid, seed=3, settings=ReadSettings(frame_start="center"))
    for one, other in zip(
        iterate_batches(plan, direct), iterate_batches(plan, CachedReader(manifest, grid, cache, seed=3)), strict=True
    ):
        assert np.array_equal(one.rows, other.rows)
        assert [(clip.row, clip.ordinal, clip.reason) for clip in one.bad] == [
            (clip.row, clip.ordinal, clip.reason) for clip in other.bad
        ]


def test_latents_that_are_not_finite_are_refused(tmp_path: Path, manifest: Manifest, grid: GridConfig) -> None:
    with pytest.raises(CacheError, match="not finite"):
        write(tmp_path / "c", manifest, grid, encode=lambda pixels: (encode(pixels)[0] / 0, None))


CAPTIONS = ["a red circle", "ein grüner Kreis", "a red circle", "x" * 5000]
TEXT = text_fingerprint(encoder={"weights": "abc"}, dtype=DTYPE)


def encode_text(captions: list[str]) -> dict[str, Tensor]:
    codes = torch.tensor([[len(text), sum(text.encode()) % 1000, 1] for text in captions])
    return {"embedding": codes[:, None, :].float() / 7, "mask": codes[:, :2] > 5}


@pytest.mark.parametrize("memory_bytes", [0, 2**30])
def test_captions_come_back_as_encoded_with_the_null_prompt(tmp_path: Path, memory_bytes: int) -> None:
    write_text_cache(
        tmp_path / "t", CAPTIONS, encode=encode_text, fingerprint=TEXT, dtype=DTYPE, batch_size=2, shard_bytes=10
    )
    cache = TextCache.open(tmp_path / "t", TEXT, captions=CAPTIONS, memory_bytes=memory_bytes)
    asked = ["", "ein grüner Kreis", "a red circle", "a red circle"]
    found, wanted = cache.get(asked), encode_text(asked)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert found["mask"].dtype == torch.bool
    assert not torch.equal(found["embedding"], encode_text(asked[::-1])["embedding"])
    copy = pickle.loads(pickle.dumps(cache))
    assert torch.equal(copy.get(asked)["embedding"], wanted["embedding"])


def test_unknown_caption_and_other_encoder_are_refused(tmp_path: Path) -> None:
    write_text_cache(tmp_path / "t", CAPTIONS, encode=encode_text, fingerprint=TEXT, dtype=DTYPE)
    cache = TextCache.open(tmp_path / "t", TEXT)
    with pytest.raises(CacheError, match="no embedding for 1 captions, first 'a blue circle'"):
        cache.get(["a red circle", "a blue circle"])
    with pytest.raises(CacheError, match="no embedding for 1 captions"):
        TextCache.open(tmp_path / "t", TEXT, captions=["a blue circle"])
    with pytest.raises(CacheError, match=r'encoder.weights: wanted "xyz", cache has "abc"'):
        TextCache.open(tmp_path / "t", text_fingerprint(encoder={"weights": "xyz"}, dtype=DTYPE))
    with pytest.raises(CacheError, match="kind"):
        LatentCache.open(tmp_path / "t", TEXT | {"kind": "latents"})


def test_batches_carry_cached_text(tmp_path: Path, manifest: Manifest, grid: GridConfig) -> None:
    captions = manifest.captions(range(len(manifest)))
    write_text_cache(tmp_path / "t", captions, encode=encode_text, fingerprint=TEXT, dtype=DTYPE)
    text = TextCache.open(tmp_path / "t", TEXT, captions=captions)
    plan = plan_epoch(assign(manifest, grid, 1, 0), grid.batch_sizes, grid.costs, seed=1, epoch=0)
    batch = next(iterate_batches(plan, ClipReader(manifest, grid, seed=1, settings=SETTINGS, text=text)))
    assert batch.text is not None
    assert torch.equal(batch.text["embedding"], encode_text(batch.captions)["embedding"])
