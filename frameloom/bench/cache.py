"""Latents from our cache against decoding and encoding anew, and against one .npy file per sample.

All three read the same clips in the same shuffled order, in turns within one run; medians are compared. The cold start
is the opening of a cache of many small latents, with every source file looked at, per row.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.config.load import load_recipe
from frameloom.config.schema import Recipe
from frameloom.core.random import numpy_stream
from frameloom.data.batch import BatchRequest
from frameloom.data.buckets import Bucket, possible_buckets
from frameloom.data.cache import LatentCache, latent_stack
from frameloom.data.cache_folder import CacheFolder
from frameloom.data.cache_keys import LATENT_COLUMNS, LATENT_KEY
from frameloom.data.reader import LatentSource
from frameloom.data.shapes_set import write_shapes
from frameloom.data.shards import Group
from frameloom.generate.parts import build_vae, to_unit_range
from frameloom.train.caching import CacheJob, open_latent_cache, write_caches
from frameloom.train.feed import build_clip_reader, build_policy, read_manifest

_BATCH = 16
_GROUP = 1024


@dataclass(frozen=True)
class CacheComparison:
    """Median seconds per clip, and seconds per row of opening; `*_ratio` is how many times faster ours is."""

    name: str
    ours_s: float
    npy_s: float
    encode_s: float
    open_per_row_s: float
    open_rows: int
    latent_bytes: int
    num_clips: int
    rounds: int

    @property
    def npy_ratio(self) -> float:
        return self.npy_s / self.ours_s

    @property
    def encode_ratio(self) -> float:
        return self.encode_s / self.ours_s

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "npy_ratio": self.npy_ratio, "encode_ratio": self.encode_ratio}

    def describe(self) -> list[str]:
        rate = self.latent_bytes / self.ours_s / 2**20
        return [
            f"{self.name}, {self.num_clips} clips, {self.rounds} rounds in turn, medians per clip",
            f"  our cache          {self.ours_s * 1e6:10.1f} us   {1 / self.ours_s:10,.0f} clips/s   {rate:,.0f} MiB/s",
            f"  one .npy per clip  {self.npy_s * 1e6:10.1f} us   ours is {self.npy_ratio:,.1f} times as fast",
            f"  decode and encode  {self.encode_s * 1e6:10.1f} us   ours is {self.encode_ratio:,.0f} times as fast",
            f"  opening            {self.open_per_row_s * 1e6:10.1f} us per row, {self.open_rows:,} rows",
        ]


def compare_cache(rounds: int = 5, *, num_clips: int = 64, open_rows: int = 20_000) -> CacheComparison:
    """The demo's clips and autoencoder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = _prepare(folder, num_clips)
        bucket, rows = _most_used(recipe)
        ours = open_latent_cache(recipe, read_manifest(recipe), build_policy(recipe))
        mean, std = ours.get(rows, bucket)
        _write_npy(folder / "npy", rows, mean, std)
        sides = [_read_ours(ours, bucket), _read_npy(folder / "npy"), _encode(recipe, bucket)]
        times = [[_time(side, _shuffle(rows, number)) for side in sides] for number in range(rounds + 1)]
        # The first round warms the files and the kernels.
        medians = [statistics.median(column) / len(rows) for column in zip(*times[1:], strict=True)]
        return CacheComparison(
            name="latents of the demo",
            ours_s=medians[0],
            npy_s=medians[1],
            encode_s=medians[2],
            open_per_row_s=_time_opening(folder / "many", open_rows, rounds) / open_rows,
            open_rows=open_rows,
            latent_bytes=2 * mean[0].numel() * mean.element_size(),
            num_clips=len(rows),
            rounds=rounds,
        )


def _prepare(folder: Path, num_clips: int) -> Recipe:
    """Clips, a fresh autoencoder and the latent cache, as a run would have them."""
    write_shapes(folder / "data", count=num_clips, seed=0, image_share=0.0)
    recipe = load_recipe(
        "shapes/demo",
        [
            *("--data.manifest", str(folder / "data" / "manifest.parquet"), "--vae.weights", str(folder / "vae")),
            *("--data.cache", f"{{latents: {folder / 'latents'}, text: null}}", "--data.workers", "0"),
            *("--data.buckets", "{64px: {9: [1.0, 16]}}", "--validation", "null"),
        ],
    )
    vae = build_vae(recipe.vae.model_copy(update={"weights": None}), seed=0)
    config = asdict(vae.config)
    write_model_folder(folder / "vae", kind="vae", name=vae.name, config=config, tensors=vae.model.state_dict())
    list(write_caches(recipe, CacheJob(latents=True)))
    return recipe


def _most_used(recipe: Recipe) -> tuple[Bucket, NDArray[np.int64]]:
    policy = build_policy(recipe)
    pairs = possible_buckets(read_manifest(recipe), policy)
    index = int(np.bincount(pairs.buckets).argmax())
    return policy.buckets[index], pairs.rows[pairs.buckets == index]


def _shuffle(rows: NDArray[np.int64], number: int) -> list[NDArray[np.int64]]:
    order = numpy_stream(0, "bench order", number).permutation(rows)
    return [order[start : start + _BATCH] for start in range(0, len(order), _BATCH)]


Side = Callable[[NDArray[np.int64]], tuple[Tensor, Tensor]]


def _read_ours(cache: LatentSource, bucket: Bucket) -> Side:
    return lambda rows: cache.get(rows, bucket)


def _write_npy(folder: Path, rows: NDArray[np.int64], mean: Tensor, std: Tensor) -> None:
    folder.mkdir()
    for place, row in enumerate(rows.tolist()):
        np.save(folder / f"{row}.npy", torch.stack([mean[place], std[place]]).numpy())


def _read_npy(folder: Path) -> Side:
    def read(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        both = torch.from_numpy(np.stack([np.load(folder / f"{row}.npy") for row in rows.tolist()]))
        return both[:, 0], both[:, 1]

    return read


def _encode(recipe: Recipe, bucket: Bucket) -> Side:
    reader = build_clip_reader(recipe, read_manifest(recipe), build_policy(recipe))
    vae = build_vae(recipe.vae, seed=recipe.seed).model.eval()

    @torch.no_grad()
    def read(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        pixels = reader.read(BatchRequest(0, 0, bucket.index, rows, rows)).pixels_BCFHW
        assert pixels is not None
        moments = vae.encode(to_unit_range(pixels))
        return moments.mean_BCFHW, torch.exp(0.5 * moments.logvar_BCFHW)

    return read


def _time(side: Side, batches: list[NDArray[np.int64]]) -> float:
    started = time.perf_counter()
    for rows in batches:
        side(rows)
    return time.perf_counter() - started


def _time_opening(path: Path, num_rows: int, rounds: int) -> float:
    """Median seconds of opening a cache of many tiny latents whose files are looked at."""
    bucket = Bucket(0, "64px", 1, "1:1", 64, 64, 1)
    items = pl.DataFrame({"row": np.arange(num_rows), "path": [f"{row // 1000}/{row}.mp4" for row in range(num_rows)]})
    items = items.with_columns(
        pl.lit(0, pl.Int32).alias("bucket"),
        pl.lit('{"kind":"video","frames":33,"fps":24.0,"interval":1}').alias("facts"),
        pl.lit(str(path)).alias("root"),
        *(pl.lit(value, pl.Int32).alias(name) for name, value in (("frames", 1), ("height", 64), ("width", 64))),
        *(pl.lit(None, pl.Int64).alias(name) for name in ("offset", "num_bytes")),
    )
    folder = CacheFolder.create(path, "latents", LATENT_COLUMNS)
    made_by, state = folder.note_fingerprint({}), {"source_bytes": 1, "source_time_ns": 1, "source_sha256": ""}
    for part in items.iter_slices(_GROUP):
        group = Group(made_by)
        for item in part.iter_rows(named=True):
            entry = {name: item[name] for name in LATENT_KEY} | state | {"reason": None}
            group.add(entry, latent_stack(bucket), {"mean": torch.full((1, 1, 1, 1), float(item["row"]))})
        folder.add_group(group)
    folder.merge_index()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        LatentCache.open(path, {}, items)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
