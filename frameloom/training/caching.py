"""Latent and text caches of a recipe: written by `frameloom data cache`, opened by the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
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
from frameloom.data.cache.encoding import LatentEncoder, TextEncoder
from frameloom.data.cache.external import (
    TextShape,
    column_latents,
    column_text,
    open_sora_plan_text,
    sdxl_latents,
    sdxl_text,
)
from frameloom.data.cache.filling import CacheJob, Filled, write_latent_cache, write_text_cache
from frameloom.data.cache.keys import latent_fingerprint, latent_items, text_fingerprint
from frameloom.data.cache.store import LatentStore, TextStore
from frameloom.data.loading.loader import read_requests
from frameloom.data.loading.reader import BatchReader, Stores
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.transforms import to_signed_range
from frameloom.models.precision import DTYPES

_log = get_logger(__name__)


def write_caches(recipe: Recipe, job: CacheJob | None = None) -> Iterator[str]:
    """Write what `data.cache` names, resuming an earlier call; yields what was written."""
    job = job or CacheJob()
    cache, policy = recipe.data.cache, build_policy(recipe)
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
    if job.prune and job.num_ranks > 1:
        raise ConfigError(f"--prune works with one process, not with {job.num_ranks}; call it again without torchrun")
    manifest = read_manifest(recipe)
    if asked["latents"]:
        reader = BatchReader(manifest, policy, recipe.data, recipe.seed)
        loaded = build_vae(recipe.vae, seed=recipe.seed)
        filled = write_latent_cache(
            Path(cache.latents or ""),
            latent_items(manifest, policy, possible_buckets(manifest, policy)),
            read_pixels=partial(read_requests, reader=reader, workers=recipe.data.workers),
            encoder=_latent_encoder(recipe, loaded, job.local_rank if job.num_ranks > 1 else None),
            fingerprint=_latent_fingerprint(recipe, policy, loaded),
            section=cache,
            job=job,
        )
        yield _describe(cache.latents, "latents", filled)
    if asked["text"]:
        pipeline = build_text(recipe.text, recipe.model)
        filled = write_text_cache(
            Path(cache.text or ""),
            list_captions(manifest),
            encoder=_text_encoder(recipe, pipeline),
            fingerprint=_text_fingerprint(recipe, pipeline),
            section=cache,
            job=job,
        )
        yield _describe(cache.text, "captions", filled)


def _describe(folder: str | None, what: str, filled: Filled) -> str:
    text = f"{folder}: {filled.num_samples:,} {what}, {filled.num_encoded:,} of them encoded now"
    text += f", {filled.num_unreadable:,} of these clips unreadable" if filled.num_unreadable else ""
    return text + (f"; {filled.num_pruned:,} others dropped" if filled.num_pruned else "")


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


def _text_encoder(recipe: Recipe, pipeline: TextPipeline) -> TextEncoder:
    return TextEncoder(lambda part: vars(pipeline.encode(part)), DTYPES[recipe.data.cache.precision])


def _latent_fingerprint(recipe: Recipe, policy: BucketPolicy, vae: LoadedVAE) -> dict[str, Any]:
    encoder = {"name": vae.name, "config": dataclasses.asdict(vae.config), "weights": vae.digest}
    return latent_fingerprint(policy, recipe.data, encoder=encoder, seed=recipe.seed)


def _text_fingerprint(recipe: Recipe, text: TextPipeline) -> dict[str, Any]:
    names = [encoder.name for encoder in recipe.text.encoders]
    encoder = {"names": names, "max_length": text.max_length, "digest": text.fingerprint()}
    # Notes are parts of the captions, which are the keys; here they only explain why captions are not found.
    note = recipe.text.note.model_dump(include={"fps", "motion"}) if recipe.text.note else None
    return text_fingerprint(recipe.data.cache, encoder=encoder, note=note)


def list_captions(manifest: Manifest) -> list[str]:
    """Every caption that a batch may carry; a row may have several."""
    texts = manifest.column("caption").to_list()
    if "captions" in manifest.columns:
        several = manifest.column("captions").drop_nulls()
        texts += several.explode().drop_nulls().unique().to_list() if isinstance(several.dtype, pl.List) else []
    return texts


def open_caches(recipe: Recipe, manifest: Manifest, policy: BucketPolicy) -> Stores:
    """CacheError if a cache does not fit the recipe, unless it may grow."""
    cache = recipe.data.cache
    latents = open_latent_store(recipe, manifest, policy) if cache.latents else None
    if cache.external is None and not cache.text:
        return Stores(latents)
    pipeline = build_text(recipe.text, recipe.model)
    if cache.external is None:
        path, fingerprint = Path(cache.text or ""), _text_fingerprint(recipe, pipeline)
        if cache.on_demand:
            return Stores(latents, TextStore.open(path, fingerprint, encoder=_text_encoder(recipe, pipeline)))
        return Stores(latents, TextStore.open(path, fingerprint, captions=list_captions(manifest)))
    shape = TextShape(pipeline.max_length, pipeline.width, pipeline.pooled_width)
    folders = [Path(folder) for folder in cache.external_folders]
    if cache.external == "open_sora_plan":
        return Stores(latents, row_text=open_sora_plan_text(manifest, folders, shape, name=cache.external_name))
    if cache.external == "sdxl":
        stored = sdxl_latents(manifest, folders[0], _shape_rule(recipe))
        return Stores(stored, row_text=sdxl_text(manifest, folders[0], shape))
    names = {"latents_path", "text_t5_path"} & set(manifest.columns)
    if not names:
        raise ConfigError(
            f"data.cache.external is open_sora2, but {manifest.source} has neither latents_path nor text_t5_path"
        )
    columns = column_latents(manifest, _shape_rule(recipe)) if "latents_path" in names else None
    return Stores(columns, row_text=column_text(manifest, shape) if "text_t5_path" in names else None)


def _shape_rule(recipe: Recipe) -> Callable[[Bucket], tuple[int, int, int, int]]:
    """The shape of a bucket's latents, as a function that survives pickling."""
    vae = build_vae(recipe.vae, seed=recipe.seed).model
    return partial(_latent_shape, vae.latent_channels, vae.strides, int(vae.causal))


def _latent_shape(
    channels: int, strides: tuple[int, int, int], causal: int, bucket: Bucket
) -> tuple[int, int, int, int]:
    frames = max(1, (bucket.frames - causal) // strides[0] + causal)
    return channels, frames, bucket.height // strides[1], bucket.width // strides[2]


def open_latent_store(recipe: Recipe, manifest: Manifest, policy: BucketPolicy) -> LatentStore:
    """CacheError if the cache does not fit the recipe, unless it may grow."""
    cache, path = recipe.data.cache, Path(recipe.data.cache.latents or "")
    loaded = build_vae(recipe.vae, seed=recipe.seed)
    fingerprint = _latent_fingerprint(recipe, policy, loaded)
    items = latent_items(manifest, policy, possible_buckets(manifest, policy))
    growth = None
    if cache.on_demand:
        reader = BatchReader(manifest, policy, recipe.data, recipe.seed)
        growth = (reader.read, lambda: _latent_encoder(recipe, loaded))
    store = LatentStore.open(path, fingerprint, items, check_files=cache.check_files, growth=growth)
    if store.num_missing:
        _log.info("%s: %d of %d latents will be encoded while training", path, store.num_missing, items.height)
    return store
