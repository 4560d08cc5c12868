"""Caches: reading, writing and opening one, and training from it instead of decoding and encoding in every step.

All ways read the same clips in the same shuffled order. The cold start is the opening of a cache of many small latents,
with every source file looked at, per row.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import count
from pathlib import Path

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness import BenchSettings, Contender, Row, Work, compare_times, measure_or_skip, take_turns
from benchmarks.step import open_trainer, our_step, prepare_demo
from frameloom.builders.data import build_policy, read_manifest
from frameloom.builders.vae import build_vae
from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.core.random import numpy_stream
from frameloom.data.buckets.policy import Bucket, possible_buckets
from frameloom.data.cache.encoding import latent_stack
from frameloom.data.cache.filling import CacheJob
from frameloom.data.cache.folder import CacheFolder
from frameloom.data.cache.keys import LATENT_COLUMNS, LATENT_KEY
from frameloom.data.cache.shards import Group
from frameloom.data.cache.store import LatentStore
from frameloom.data.loading.batch import BatchRequest
from frameloom.data.loading.reader import BatchReader
from frameloom.data.media.transforms import to_signed_range
from frameloom.demo.shapes_set import write_shapes
from frameloom.training.caching import open_latent_store, write_caches

_BATCH = 16
_GROUP = 1024


def measure(bench: BenchSettings) -> Iterator[Row]:
    """The demo's clips and autoencoder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = _prepare(folder, bench.pick(512, 16))
        yield from measure_or_skip("cache", "reading", _measure_reading, recipe, folder, bench)
        yield from measure_or_skip("cache", "writing", _measure_writing, recipe, folder, bench)
        yield from measure_or_skip("cache", "opening", _measure_opening, folder / "many", bench)
    yield from measure_or_skip(
        "cache", "training", _measure_training, bench, "the demo's autoencoder", 2 * bench.rounds
    )
    if not bench.is_quick:
        large = ("--vae.size", "8ch", "--data.buckets", "{64px: {9: [1.0, 4]}}")
        name = "Open-Sora-Plan's autoencoder, 147M"
        yield from measure_or_skip("cache", "training, large", _measure_training, bench, name, bench.rounds, large)


def _measure_reading(recipe: Recipe, folder: Path, bench: BenchSettings) -> Iterator[Row]:
    bucket, rows = _most_used(recipe)
    ours = open_latent_store(recipe, read_manifest(recipe), build_policy(recipe))
    mean, std = ours.get(rows, bucket)
    _write_npy(folder / "npy", rows, mean, std)
    ways = {"ours": _read_ours(ours, bucket), "npy": _read_npy(folder / "npy"), "encode": _encode(recipe, bucket)}
    times = take_turns({name: _pass_over(way, rows) for name, way in ways.items()}, bench.rounds)
    for name, against in (("npy", "one .npy per clip"), ("encode", "decoding and encoding anew")):
        yield compare_times(
            "cache",
            "reading a latent",
            times["ours"],
            times[name],
            against=against,
            items=len(rows),
            note=f"{2 * mean[0].nbytes / 1024:.0f} KiB",
        )


def _pass_over(way: Way, rows: NDArray[np.int64]) -> Work:
    """All rows in a new order each time."""
    numbers = count()

    def run() -> None:
        for batch in _shuffle(rows, next(numbers)):
            way(batch)

    return run


def _measure_writing(recipe: Recipe, folder: Path, bench: BenchSettings) -> Row:
    """Both encode the same clips for the same buckets; ours also digests, and can be stopped and gone on with."""
    policy, place = build_policy(recipe), folder / "written"
    pairs = possible_buckets(read_manifest(recipe), policy)
    work = [
        (_encode(recipe, policy.buckets[index]), index, pairs.rows[pairs.buckets == index])
        for index in np.unique(pairs.buckets).tolist()
    ]
    changed = recipe.model_copy(
        update={
            "data": recipe.data.model_copy(
                update={"cache": recipe.data.cache.model_copy(update={"latents": str(place)})}
            )
        }
    )

    def write_npy() -> None:
        place.mkdir()
        for encode, index, rows in work:
            for start in range(0, len(rows), _BATCH):
                batch = rows[start : start + _BATCH]
                mean, std = encode(batch)
                for number, row in enumerate(batch.tolist()):
                    np.save(place / f"{index}-{row}.npy", torch.stack([mean[number], std[number]]).numpy())

    def clear() -> None:
        shutil.rmtree(place, ignore_errors=True)

    times = take_turns(
        {
            "ours": Contender(lambda: list(write_caches(changed, CacheJob(latents=True))), prepare=clear),
            "other": Contender(write_npy, prepare=clear),
        },
        min(bench.rounds, 3),
    )
    against, count = "encoding, one .npy per clip", len(pairs.rows)
    note = f"{count} latents, {_BATCH} at a time, the start of the command included"
    return compare_times(
        "cache", "writing a latent", times["ours"], times["other"], against=against, items=count, note=note
    )


def _measure_opening(path: Path, bench: BenchSettings) -> Row:
    num_rows = bench.pick(20_000, 2000)
    items = _write_many(path, num_rows)
    times = take_turns({"ours": lambda: LatentStore.open(path, {}, items)}, bench.rounds)
    return compare_times("cache", f"opening, per row of {num_rows:,}", times["ours"], items=num_rows)


def _measure_training(bench: BenchSettings, autoencoder: str, rounds: int, changes: Sequence[str] = ()) -> Row:
    """Steps of the demo's denoiser from caches, and with decoding, autoencoder and text encoder in every step."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        num_clips = 40 if bench.is_quick or changes else 96
        cached = prepare_demo(folder, steps=rounds + 4, num_clips=num_clips, changes=changes)
        nothing = cached.data.cache.model_copy(update={"latents": None, "text": None})
        fresh = cached.model_copy(
            update={"name": "fresh", "data": cached.data.model_copy(update={"cache": nothing, "workers": 0})}
        )
        (folder / "fresh").mkdir()
        times = take_turns(
            {
                "ours": our_step(open_trainer(cached, folder, stack)),
                "other": our_step(open_trainer(fresh, folder, stack)),
            },
            rounds,
        )
    return compare_times(
        "cache",
        f"a training step from caches, {autoencoder}",
        times["ours"],
        times["other"],
        against="decoding and encoding in every step",
    )


def _prepare(folder: Path, num_clips: int) -> Recipe:
    """Clips, a fresh autoencoder and the latent cache, as a run would have them."""
    write_shapes(folder / "data", count=num_clips, seed=0, image_share=0.0)
    recipe = load_recipe(
        "shapes/demo",
        [
            *("--data.manifest", str(folder / "data" / "manifest.parquet"), "--vae.weights", str(folder / "vae")),
            *("--data.cache", f"{{latents: {folder / 'latents'}, text: null, batch: {_BATCH}}}", "--data.workers", "0"),
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


Way = Callable[[NDArray[np.int64]], tuple[Tensor, Tensor]]


def _read_ours(cache: LatentStore, bucket: Bucket) -> Way:
    return lambda rows: cache.get(rows, bucket)


def _write_npy(folder: Path, rows: NDArray[np.int64], mean: Tensor, std: Tensor) -> None:
    folder.mkdir()
    for place, row in enumerate(rows.tolist()):
        np.save(folder / f"{row}.npy", torch.stack([mean[place], std[place]]).numpy())


def _read_npy(folder: Path) -> Way:
    def read(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        both = torch.from_numpy(np.stack([np.load(folder / f"{row}.npy") for row in rows.tolist()]))
        return both[:, 0], both[:, 1]

    return read


def _encode(recipe: Recipe, bucket: Bucket) -> Way:
    reader = BatchReader(read_manifest(recipe), build_policy(recipe), recipe.data, recipe.seed)
    vae = build_vae(recipe.vae, seed=recipe.seed).model.eval()

    @torch.no_grad()
    def read(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        pixels = reader.read(BatchRequest(0, 0, bucket.index, rows, rows)).pixels_BCFHW
        assert pixels is not None
        moments = vae.encode(to_signed_range(pixels))
        return moments.mean_BCFHW, torch.exp(0.5 * moments.logvar_BCFHW)

    return read


def _write_many(path: Path, num_rows: int) -> pl.DataFrame:
    """A cache of many tiny latents, and the table that it is opened for."""
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
    return items
