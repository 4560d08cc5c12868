"""Latent and text caches of a recipe: written by `frameloom data cache`, opened by the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from frameloom.builders.data import build_policy, read_manifest
from frameloom.builders.text import TextPipeline, build_text
from frameloom.builders.vae import LoadedVAE, build_vae
from frameloom.config.schema.recipe import Recipe
from frameloom.core.device import pick_device
from frameloom.core.errors import ConfigError
from frameloom.core.logging import get_logger
from frameloom.data.buckets.policy import Bucket, BucketPolicy, possible_buckets
from frameloom.data.cache.cache import LatentCache, TextCache
from frameloom.data.cache.external import (
    ColumnText,
    ExternalLatents,
    ExternalText,
    OpenSoraPlanText,
    SDXLText,
    TextShape,
    column_latents,
    sdxl_latents,
)
from frameloom.data.cache.filling import Filled, FillSettings, LatentEncoder, write_latent_cache, write_text_cache
from frameloom.data.cache.folder import CacheFolder
from frameloom.data.cache.growing import GrowingLatents, GrowingText
from frameloom.data.cache.keys import LATENT_COLUMNS, TEXT_COLUMNS, latent_fingerprint, latent_items, text_fingerprint
from frameloom.data.loading.batch import Batch, BatchRequest
from frameloom.data.loading.loader import read_requests
from frameloom.data.loading.reader import BatchReader
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.transforms import to_signed_range
from frameloom.models.precision import DTYPES

_log = get_logger(__name__)


@dataclass(frozen=True)
class CacheJob:
    """What one call of `frameloom data cache` does; None for `latents` and `text`: what the recipe names."""

    latents: bool | None = None
    text: bool | None = None
    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    verify: bool = True
    prune: bool = False


def write_caches(recipe: Recipe, job: CacheJob | None = None) -> Iterator[str]:
    """Write what `data.cache` names, going on where an earlier call stopped; says what was written."""
    job = job or CacheJob()
    wanted = _choose(recipe, job)
    if job.prune and job.num_ranks > 1:
        raise ConfigError(f"--prune works with one process, not with {job.num_ranks}; call it again without torchrun")
    policy, manifest = build_policy(recipe), read_manifest(recipe)
    if "latents" in wanted:
        yield _say(recipe.data.cache.latents, "latents", _write_latents(recipe, manifest, policy, job))
    if "text" in wanted:
        yield _say(recipe.data.cache.text, "captions", _write_text(recipe, manifest, job))


def _choose(recipe: Recipe, job: CacheJob) -> list[str]:
    cache = recipe.data.cache
    folders, asked = {"latents": cache.latents, "text": cache.text}, {"latents": job.latents, "text": job.text}
    for name, is_asked in asked.items():
        if is_asked and folders[name] is None:
            raise ConfigError(
                f"--{name}: data.cache.{name} names no folder; set it in the recipe or on the command line"
            )
    if not any(asked.values()):
        asked = {name: folder is not None for name, folder in folders.items()}
    if not any(asked.values()):
        raise ConfigError("data.cache names no folder; set data.cache.latents, data.cache.text or both")
    return [name for name, is_asked in asked.items() if is_asked]


def _say(folder: str | None, what: str, filled: Filled) -> str:
    text = f"{folder}: {filled.num_samples:,} {what}, {filled.num_encoded:,} of them encoded now"
    text += f", {filled.num_unreadable:,} of these clips unreadable" if filled.num_unreadable else ""
    return text + (f"; {filled.num_pruned:,} others dropped" if filled.num_pruned else "")


def _fill_settings(recipe: Recipe, job: CacheJob) -> FillSettings:
    cache = recipe.data.cache
    return FillSettings(
        batch=cache.batch,
        portion=cache.group,
        rank=job.rank,
        num_ranks=job.num_ranks,
        check_files=cache.check_files,
        verify=job.verify,
        prune=job.prune,
    )


def _write_latents(recipe: Recipe, manifest: Manifest, policy: BucketPolicy, job: CacheJob) -> Filled:
    loaded = build_vae(recipe.vae, seed=recipe.seed)
    reader = BatchReader(manifest, policy, recipe.data, seed=recipe.seed)

    def read_pixels(requests: Iterator[BatchRequest]) -> Iterable[Batch]:
        return read_requests(requests, reader, workers=recipe.data.workers, timeout_s=recipe.data.timeout_s)

    return write_latent_cache(
        Path(recipe.data.cache.latents or ""),
        latent_items(manifest, policy, possible_buckets(manifest, policy)),
        read_pixels=read_pixels,
        encoder=_latent_encoder(recipe, loaded, job.local_rank if job.num_ranks > 1 else None),
        fingerprint=_latent_fingerprint(recipe, policy, loaded),
        settings=_fill_settings(recipe, job),
    )


def _latent_encoder(recipe: Recipe, loaded: LoadedVAE, local_rank: int | None = None) -> LatentEncoder:
    device = pick_device(recipe.train.device)
    if device.type == "cuda" and local_rank is not None:
        device = torch.device("cuda", local_rank)
    vae = loaded.model.to(device).eval()

    @torch.no_grad()
    def encode(pixels_BCFHW: Tensor) -> tuple[Tensor, Tensor]:
        moments = vae.encode(to_signed_range(pixels_BCFHW.to(device)))
        return moments.mean_BCFHW, torch.exp(0.5 * moments.logvar_BCFHW)

    cache = recipe.data.cache
    return LatentEncoder(encode, DTYPES[cache.precision], cache.store, recipe.seed)


def _write_text(recipe: Recipe, manifest: Manifest, job: CacheJob) -> Filled:
    pipeline = build_text(recipe.text, recipe.model)
    return write_text_cache(
        Path(recipe.data.cache.text or ""),
        list_captions(manifest),
        encode=lambda part: vars(pipeline.encode(part)),
        fingerprint=_text_fingerprint(recipe, pipeline),
        dtype=DTYPES[recipe.data.cache.precision],
        settings=_fill_settings(recipe, job),
    )


def _latent_fingerprint(recipe: Recipe, policy: BucketPolicy, vae: LoadedVAE) -> dict[str, Any]:
    cache = recipe.data.cache
    return latent_fingerprint(
        policy=policy,
        data=recipe.data,
        encoder={"name": vae.name, "config": dataclasses.asdict(vae.config), "weights": vae.digest},
        dtype=DTYPES[cache.precision],
        store=cache.store,
        seed=recipe.seed,
    )


def _text_fingerprint(recipe: Recipe, text: TextPipeline) -> dict[str, Any]:
    names = [encoder.name for encoder in recipe.text.encoders]
    encoder = {"names": names, "max_length": text.max_length, "digest": text.fingerprint()}
    # Notes are parts of the captions, which are the keys; here they only explain why captions are not found.
    note = recipe.text.note.model_dump(include={"fps", "motion"}) if recipe.text.note else None
    return text_fingerprint(encoder=encoder, dtype=DTYPES[recipe.data.cache.precision], note=note)


def list_captions(manifest: Manifest) -> list[str]:
    """Every caption that a batch may carry; a row may have several."""
    texts = manifest.column("caption").to_list()
    if "captions" in manifest.columns:
        several = manifest.column("captions").drop_nulls()
        texts += several.explode().drop_nulls().unique().to_list() if isinstance(several.dtype, pl.List) else []
    return texts


@dataclass(frozen=True)
class Caches:
    """What a run reads instead of encoding; `row_text` are embeddings that are known by row instead of by caption."""

    latents: LatentCache | GrowingLatents | ExternalLatents | None = None
    text: TextCache | GrowingText | None = None
    row_text: ExternalText | None = None


def open_caches(recipe: Recipe, manifest: Manifest, policy: BucketPolicy) -> Caches:
    """CacheError if a cache does not fit the recipe."""
    cache = recipe.data.cache
    latents = open_latent_cache(recipe, manifest, policy) if cache.latents else None
    text = open_text_cache(recipe, manifest) if cache.text else None
    if cache.foreign is None:
        return Caches(latents, text)
    pipeline = build_text(recipe.text, recipe.model)
    shape = TextShape(pipeline.max_length, pipeline.width, pipeline.pooled_width)
    folders = [Path(folder) for folder in cache.foreign_folders]
    if cache.foreign == "open_sora_plan":
        return Caches(latents, row_text=OpenSoraPlanText(manifest, folders, shape, name=cache.foreign_name))
    if cache.foreign == "sdxl":
        stored = sdxl_latents(manifest, folders[0], _LatentShape(recipe))
        return Caches(stored, row_text=SDXLText(manifest, folders[0], shape))
    return _open_columns(recipe, manifest, shape)


def _open_columns(recipe: Recipe, manifest: Manifest, shape: TextShape) -> Caches:
    names = {"latents_path", "text_t5_path"} & set(manifest.columns)
    if not names:
        raise ConfigError(
            f"data.cache.foreign is open_sora2, but {manifest.source} has neither latents_path nor text_t5_path"
        )
    latents = column_latents(manifest, _LatentShape(recipe)) if "latents_path" in names else None
    return Caches(latents, row_text=ColumnText(manifest, shape) if "text_t5_path" in names else None)


class _LatentShape:
    """The shape of a bucket's latents; a class, so that it survives pickling."""

    def __init__(self, recipe: Recipe) -> None:
        vae = build_vae(recipe.vae, seed=recipe.seed).model
        self._channels, self._strides, self._causal = vae.latent_channels, vae.strides, int(vae.causal)

    def __call__(self, bucket: Bucket) -> tuple[int, int, int, int]:
        stride_f, stride_h, stride_w = self._strides
        frames = max(1, (bucket.frames - self._causal) // stride_f + self._causal)
        return self._channels, frames, bucket.height // stride_h, bucket.width // stride_w


def open_latent_cache(recipe: Recipe, manifest: Manifest, policy: BucketPolicy) -> LatentCache | GrowingLatents:
    """CacheError if the cache does not fit the recipe, unless it may grow."""
    cache, path = recipe.data.cache, Path(recipe.data.cache.latents or "")
    loaded = build_vae(recipe.vae, seed=recipe.seed)
    fingerprint = _latent_fingerprint(recipe, policy, loaded)
    items = latent_items(manifest, policy, possible_buckets(manifest, policy))
    if not cache.on_demand:
        return LatentCache.open(path, fingerprint, items, check_files=cache.check_files)
    folder = CacheFolder.create(path, "latents", LATENT_COLUMNS)
    opened = LatentCache.open(path, fingerprint, items, check_files=cache.check_files, on_missing="allow")
    _tell_missing(path, opened.num_missing, items)
    return GrowingLatents(
        opened,
        folder,
        items,
        read=BatchReader(manifest, policy, recipe.data, seed=recipe.seed).read,
        encoder=lambda: _latent_encoder(recipe, loaded),
        made_by=folder.note_fingerprint(fingerprint),
    )


def _tell_missing(path: Path, num_missing: int, items: pl.DataFrame) -> None:
    if num_missing:
        _log.info("%s: %d of %d latents will be encoded while training", path, num_missing, items.height)


def open_text_cache(recipe: Recipe, manifest: Manifest) -> TextCache | GrowingText:
    """CacheError if the cache does not fit the recipe, unless it may grow."""
    cache, path = recipe.data.cache, Path(recipe.data.cache.text or "")
    pipeline = build_text(recipe.text, recipe.model)
    fingerprint = _text_fingerprint(recipe, pipeline)
    if not cache.on_demand:
        return TextCache.open(path, fingerprint, captions=list_captions(manifest))
    folder = CacheFolder.create(path, "text", TEXT_COLUMNS)
    return GrowingText(
        TextCache.open(path, fingerprint, on_missing="allow"),
        folder,
        encode=lambda part: vars(pipeline.encode(part)),
        dtype=DTYPES[cache.precision],
        made_by=folder.note_fingerprint(fingerprint),
    )
