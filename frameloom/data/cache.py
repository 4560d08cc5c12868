"""Latent and text caches: what frozen encoders would give, computed once.

A cache knows what it was made from: its fingerprint spells out the encoder, the transforms, the bucket geometry, the
manifest and the number format, and a cache that differs in any of them is refused with the difference.
Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.errors import CacheError, ConfigError
from frameloom.core.files import digest_value
from frameloom.core.progress import ProgressBar
from frameloom.data.batch import Batch, BatchRequest
from frameloom.data.buckets import Pairs
from frameloom.data.decode import ClipError
from frameloom.data.grid import Bucket, GridConfig
from frameloom.data.manifest import Manifest
from frameloom.data.reader import ReadSettings
from frameloom.data.shards import REBUILD, SHARD_BYTES, Entry, ShardReader, ShardWriter

# Caches up to this size are held in memory by each process that opens them.
MEMORY_BYTES = 2 * 2**30

ReadPixels = Callable[[Iterator[BatchRequest]], Iterable[Batch]]
EncodePixels = Callable[[Tensor], tuple[Tensor, Tensor | None]]
EncodeText = Callable[[list[str]], dict[str, Tensor]]


def latent_fingerprint(
    *,
    manifest: Manifest,
    grid: GridConfig,
    settings: ReadSettings,
    encoder: Mapping[str, Any],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What a latent cache depends on; `encoder` tells weights (a digest) and config. Random settings are refused."""
    problems = []
    if settings.frame_start == "random":
        problems.append("frame_start: random cannot be cached, a cache holds one window per clip; use first or center")
    if settings.flip_probability:
        problems.append(f"flip_probability: {settings.flip_probability:g} cannot be cached; use 0, or no latent cache")
    if problems:
        raise ConfigError(problems)
    return {
        "kind": "latents",
        "manifest": manifest.fingerprint,
        "buckets": grid.geometry(),
        "transforms": {"frame_start": settings.frame_start, "resize": "cover 1", "crop": "center"},
        "encoder": dict(encoder),
        "dtype": str(dtype).removeprefix("torch."),
    }


def text_fingerprint(*, encoder: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What a text cache depends on, besides the captions, which are its keys."""
    return {"kind": "text", "encoder": dict(encoder), "dtype": str(dtype).removeprefix("torch.")}


def write_latent_cache(
    folder: Path,
    pairs: Pairs,
    *,
    buckets: Sequence[Bucket],
    read_pixels: ReadPixels,
    encode: EncodePixels,
    fingerprint: Mapping[str, Any],
    dtype: torch.dtype,
    max_batch: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Encode every (row, bucket) once; an interrupted call goes on where it stopped, a finished one returns at once.

    `read_pixels` turns requests into batches in the same order, leaving out clips that cannot be read and listing them
    as bad (a `ClipReader` with no replacements); these are kept in the index with their reason.
    """
    requests = _cut_requests(pairs, buckets, max_batch)
    work = digest_value([_digest_array(pairs.rows), _digest_array(pairs.buckets), max_batch])
    writer = ShardWriter(folder, fingerprint=fingerprint, work=work, shard_bytes=shard_bytes)
    if writer.is_complete:
        return
    rest = requests[writer.next_unit :]
    num_done = len(pairs.rows) - sum(len(request.rows) for request in rest)
    with ProgressBar("latents", len(pairs.rows), done=num_done) as progress:
        for request, batch in zip(rest, read_pixels(iter(rest)), strict=True):
            _add_latents(writer, request, batch, encode, dtype)
            progress.advance(len(request.rows), batch.bucket.name)
    writer.finish({"row": pl.Int64, "bucket": pl.Int32, "reason": pl.String})


def _cut_requests(pairs: Pairs, buckets: Sequence[Bucket], max_batch: int | None) -> list[BatchRequest]:
    requests: list[BatchRequest] = []
    for index in np.unique(pairs.buckets).tolist():
        rows = pairs.rows[pairs.buckets == index]
        size = min(buckets[index].batch_size, max_batch or buckets[index].batch_size)
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            requests.append(BatchRequest(0, len(requests), index, part, part))
    return requests


def _add_latents(
    writer: ShardWriter, request: BatchRequest, batch: Batch, encode: EncodePixels, dtype: torch.dtype
) -> None:
    tensors: dict[str, Tensor] = {}
    name = f"{request.bucket}.mean"
    if batch.size:
        assert batch.pixels_BCFHW is not None
        mean, std = encode(batch.pixels_BCFHW)
        tensors[name] = _store(mean, dtype, batch.size, "latents", batch.rows.tolist())
        if std is not None:
            tensors[f"{request.bucket}.std"] = _store(std, dtype, batch.size, "latents", batch.rows.tolist())
    good = [
        {"row": row, "bucket": request.bucket, "reason": None, "tensor": name, "place": place}
        for place, row in enumerate(batch.rows.tolist())
    ]
    bad: list[Entry] = [{"row": clip.row, "bucket": request.bucket, "reason": clip.reason} for clip in batch.bad]
    writer.add(request.index, tensors, [*good, *bad])


def _store(tensor: Tensor, dtype: torch.dtype, size: int, what: str, names: list[Any]) -> Tensor:
    if len(tensor) != size:
        raise ValueError(f"the encoder gave {len(tensor)} {what} for {size} inputs")
    if not tensor.is_floating_point():
        return tensor.detach().cpu().clone()
    stored = tensor.detach().to("cpu", dtype, copy=True)
    if not stored.isfinite().all():
        wrong = [names[i] for i in range(size) if not stored[i].isfinite().all()]
        raise CacheError(f"the encoder gave {what} that are not finite in {dtype} for {wrong[:8]}; use a wider dtype")
    return stored


class LatentCache:
    """Latents by (row, bucket). Pickled, it opens its folder again, mapped instead of in memory."""

    def __init__(self, folder: Path, expected: Mapping[str, Any], memory_bytes: int) -> None:
        self.folder = folder
        self._expected = dict(expected)
        self._shards = ShardReader(folder, expected=expected, memory_bytes=memory_bytes)
        self._by_bucket = {
            int(part["bucket"][0]): part for part in self._shards.index.sort("row").partition_by("bucket")
        }
        self._rows = {bucket: part["row"].to_numpy() for bucket, part in self._by_bucket.items()}
        unreadable = self._shards.index.filter(pl.col("reason").is_not_null())
        self._reasons = {
            (row, bucket): reason for row, bucket, reason in unreadable.select("row", "bucket", "reason").rows()
        }

    @classmethod
    def open(
        cls,
        folder: Path,
        expected: Mapping[str, Any],
        *,
        pairs: Pairs | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> Self:
        """CacheError if the cache is stale, incomplete or damaged, or lacks one of `pairs`."""
        cache = cls(folder, expected, memory_bytes)
        if pairs is not None:
            cache._check_pairs(pairs)
        return cache

    def _check_pairs(self, pairs: Pairs) -> None:
        missing = sum(
            int((~np.isin(pairs.rows[pairs.buckets == bucket], self._rows.get(bucket, []))).sum())
            for bucket in np.unique(pairs.buckets).tolist()
        )
        if missing:
            raise CacheError(
                f"{self.folder}: lacks {missing} of {len(pairs.rows)} clips that these buckets can ask for; "
                f"remove the folder and {REBUILD}"
            )

    @property
    def bad(self) -> dict[int, str]:
        """Rows that could not be read when the cache was written, with the reason."""
        part = self._shards.index.filter(pl.col("reason").is_not_null())
        return dict(zip(part["row"].to_list(), part["reason"].to_list(), strict=True))

    def check(self, row: int, bucket: Bucket) -> None:
        """ClipError if this clip was bad when the cache was written."""
        reason = self._reasons.get((row, bucket.index))
        if reason is not None:
            raise ClipError(str(reason))

    def get(self, rows: NDArray[np.int64], bucket: Bucket) -> tuple[Tensor, Tensor]:
        """(mean, standard deviation), each [B, C, F, H, W]; zeros for an encoder that has no deviation."""
        places = self._places(rows, bucket)
        part = self._by_bucket[bucket.index]
        shards, slots = part["shard"].to_numpy()[places], part["slot"].to_numpy()[places]
        if (shards < 0).any():
            raise CacheError(f"{self.folder}: rows {rows[shards < 0].tolist()} could not be read when it was written")
        mean = self._shards.get(f"{bucket.index}.mean", shards, slots)
        std = self._shards.get(f"{bucket.index}.std", shards, slots)
        assert mean is not None
        return mean, torch.zeros_like(mean) if std is None else std

    def _places(self, rows: NDArray[np.int64], bucket: Bucket) -> NDArray[np.int64]:
        known = self._rows.get(bucket.index, np.empty(0, dtype=np.int64))
        places = np.searchsorted(known, rows)
        found = places < len(known)
        found[found] = known[places[found]] == rows[found]
        if not found.all():
            raise CacheError(
                f"{self.folder}: no latent for rows {rows[~found].tolist()[:8]} in bucket {bucket.name}; "
                f"remove the folder and {REBUILD}"
            )
        return places

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self._expected, 0)


def caption_key(caption: str) -> int:
    """A signed 64-bit hash of the text, the key of a text cache."""
    return int.from_bytes(hashlib.blake2b(caption.encode(), digest_size=8).digest(), "little", signed=True)


def write_text_cache(
    folder: Path,
    captions: Iterable[str],
    *,
    encode: EncodeText,
    fingerprint: Mapping[str, Any],
    dtype: torch.dtype,
    batch_size: int = 64,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Encode every different caption and the null prompt "" once; resumable like the latent cache.

    `encode` gives tensors [B, ...] by name, of the same shape for every batch; those that are not floating point
    (masks, token ids) keep their type.
    """
    unique = ["", *sorted(set(captions) - {""})]
    keys = [caption_key(caption) for caption in unique]
    if len(set(keys)) != len(keys):
        raise CacheError("two captions have the same 64-bit hash; change one of them by a character")
    work = digest_value([_digest_array(np.array(keys, dtype=np.int64)), batch_size])
    writer = ShardWriter(folder, fingerprint=fingerprint, work=work, shard_bytes=shard_bytes)
    if writer.is_complete:
        return
    starts = list(range(0, len(unique), batch_size))
    with ProgressBar("captions", len(unique), done=min(writer.next_unit * batch_size, len(unique))) as progress:
        for unit in range(writer.next_unit, len(starts)):
            part = unique[starts[unit] : starts[unit] + batch_size]
            tensors = {
                name: _store(tensor, dtype, len(part), "embeddings", part) for name, tensor in encode(part).items()
            }
            first = next(iter(tensors))
            writer.add(
                unit,
                tensors,
                [{"key": caption_key(text), "tensor": first, "place": place} for place, text in enumerate(part)],
            )
            progress.advance(len(part))
    writer.finish({"key": pl.Int64})


class TextCache:
    """Text embeddings by caption. Pickled, it opens its folder again, mapped instead of in memory."""

    def __init__(self, folder: Path, expected: Mapping[str, Any], memory_bytes: int) -> None:
        self.folder = folder
        self._expected = dict(expected)
        self._shards = ShardReader(folder, expected=expected, memory_bytes=memory_bytes)
        index = self._shards.index.sort("key")
        self._keys, self._shard, self._slot = (index[name].to_numpy() for name in ("key", "shard", "slot"))

    @classmethod
    def open(
        cls,
        folder: Path,
        expected: Mapping[str, Any],
        *,
        captions: Iterable[str] | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> Self:
        """CacheError if the cache is stale, incomplete or damaged, or lacks one of `captions`."""
        cache = cls(folder, expected, memory_bytes)
        if captions is not None:
            cache._places(sorted(set(captions)))
        return cache

    def get(self, captions: list[str]) -> dict[str, Tensor]:
        """The stored tensors of these captions, stacked in their order."""
        places = self._places(captions)
        tensors = {name: self._shards.get(name, self._shard[places], self._slot[places]) for name in self._shards.names}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def _places(self, captions: list[str]) -> NDArray[np.int64]:
        wanted = np.array([caption_key(caption) for caption in captions], dtype=np.int64)
        places = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        missing = np.flatnonzero(self._keys[places] != wanted)
        if len(missing):
            raise CacheError(
                f"{self.folder}: no embedding for {len(missing)} captions, first {captions[missing[0]]!r}; "
                f"remove the folder and {REBUILD}"
            )
        return places

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self._expected, 0)


def _digest_array(values: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
