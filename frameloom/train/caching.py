"""Latent and text caches of a recipe: written by `frameloom data cache`, opened by the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frameloom.config.schema import Recipe
from frameloom.core.errors import ConfigError
from frameloom.data.batch import Batch, BatchRequest
from frameloom.data.buckets import possible_buckets
from frameloom.data.cache import (
    LatentCache,
    TextCache,
    latent_fingerprint,
    text_fingerprint,
    write_latent_cache,
    write_text_cache,
)
from frameloom.data.grid import GridConfig
from frameloom.data.loader import read_requests
from frameloom.data.manifest import Manifest
from frameloom.data.reader import ClipReader
from frameloom.generate.parts import LoadedVAE, TextPipeline, build_text, build_vae, pick_device, to_unit_range
from frameloom.train.feed import build_grid, read_manifest, read_settings

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def write_caches(recipe: Recipe) -> Iterator[str]:
    """Write what `data.cache` names, going on where an earlier call stopped; says what was written."""
    if not (recipe.data.cache.latents or recipe.data.cache.text):
        raise ConfigError("data.cache names no folder; set data.cache.latents, data.cache.text or both")
    grid, manifest = build_grid(recipe), read_manifest(recipe)
    if recipe.data.cache.latents:
        yield _write_latents(recipe, manifest, grid, Path(recipe.data.cache.latents))
    if recipe.data.cache.text:
        yield _write_text(recipe, manifest, Path(recipe.data.cache.text))


def open_latent_cache(recipe: Recipe, manifest: Manifest, grid: GridConfig) -> LatentCache:
    """CacheError if the cache does not fit the recipe."""
    return LatentCache.open(
        Path(recipe.data.cache.latents or ""),
        _latent_fingerprint(recipe, manifest, grid, build_vae(recipe.vae, seed=recipe.seed)),
        pairs=possible_buckets(manifest, grid),
    )


def open_text_cache(recipe: Recipe, manifest: Manifest) -> TextCache:
    expected = _text_fingerprint(recipe, build_text(recipe.text))
    return TextCache.open(Path(recipe.data.cache.text or ""), expected, captions=_captions(manifest))


def _write_latents(recipe: Recipe, manifest: Manifest, grid: GridConfig, folder: Path) -> str:
    device = pick_device(recipe.train.device)
    loaded = build_vae(recipe.vae, seed=recipe.seed)
    vae = loaded.model.to(device).eval()
    settings = read_settings(recipe)
    # An unreadable clip has no latent; the run replaces it, as it would without a cache.
    reader = ClipReader(manifest, grid, seed=recipe.seed, settings=dataclasses.replace(settings, max_replacements=0))

    @torch.no_grad()
    def encode(pixels_BCFHW: Tensor) -> tuple[Tensor, Tensor]:
        moments = vae.encode(to_unit_range(pixels_BCFHW.to(device)))
        return moments.mean_BCFHW, torch.exp(0.5 * moments.logvar_BCFHW)

    def read_pixels(requests: Iterator[BatchRequest]) -> Iterable[Batch]:
        return read_requests(requests, reader, workers=recipe.data.workers, timeout_s=recipe.data.timeout_s)

    pairs = possible_buckets(manifest, grid)
    write_latent_cache(
        folder,
        pairs,
        buckets=grid.buckets,
        read_pixels=read_pixels,
        encode=encode,
        fingerprint=_latent_fingerprint(recipe, manifest, grid, loaded),
        dtype=_DTYPES[recipe.data.cache.precision],
    )
    return f"{folder}: {len(pairs.rows):,} latents"


def _write_text(recipe: Recipe, manifest: Manifest, folder: Path) -> str:
    pipeline = build_text(recipe.text)
    captions = sorted(set(_captions(manifest)))

    def encode(part: list[str]) -> dict[str, Tensor]:
        return vars(pipeline.encode(part))

    fingerprint = _text_fingerprint(recipe, pipeline)
    write_text_cache(
        folder, captions, encode=encode, fingerprint=fingerprint, dtype=_DTYPES[recipe.data.cache.precision]
    )
    return f"{folder}: {len(captions):,} captions"


def _latent_fingerprint(recipe: Recipe, manifest: Manifest, grid: GridConfig, vae: LoadedVAE) -> dict[str, Any]:
    return latent_fingerprint(
        manifest=manifest,
        grid=grid,
        settings=read_settings(recipe),
        encoder={"name": vae.name, "digest": vae.digest},
        dtype=_DTYPES[recipe.data.cache.precision],
    )


def _text_fingerprint(recipe: Recipe, text: TextPipeline) -> dict[str, Any]:
    names = [encoder.name for encoder in recipe.text.encoders]
    encoder = {"names": names, "max_length": text.max_length, "digest": text.fingerprint()}
    return text_fingerprint(encoder=encoder, dtype=_DTYPES[recipe.data.cache.precision])


def _captions(manifest: Manifest) -> list[str]:
    return manifest.column("caption").to_list()
