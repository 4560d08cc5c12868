"""Caches that grow during training: a missing sample is encoded when a batch asks for it.

Nothing is sent between ranks: each commits whole groups of its own and looks for those of the others before it encodes.
A run gets the same samples as from a full cache, because a sample is encoded alone in both.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.data.buckets.policy import Bucket
from frameloom.data.cache.cache import LatentCache, TextCache, join_latents, join_text
from frameloom.data.cache.filling import EncodeText, LatentEncoder, add_captions, add_latents
from frameloom.data.cache.folder import CacheFolder
from frameloom.data.cache.keys import LATENT_KEY
from frameloom.data.cache.shards import SHARD_BYTES, Group
from frameloom.data.cache.source_state import look_at
from frameloom.data.loading.batch import Batch, BatchRequest

GROUP = 64
_LOOK_EVERY_S = 10.0
_COMMIT_EVERY_S = 60.0


class _Growth:
    """The group that is being filled; committed when it is large or old, and when the process ends in order."""

    def __init__(self, folder: CacheFolder, group: Group, size: int) -> None:
        self._folder, self.group, self._size = folder, group, size
        self._looked = self._committed = time.monotonic()
        self._finalizer = weakref.finalize(self, _commit_rest, folder, group)

    @property
    def is_due(self) -> bool:
        is_old = time.monotonic() - self._committed > _COMMIT_EVERY_S
        return bool(self.group) and (len(self.group) >= self._size or self.group.num_bytes >= SHARD_BYTES or is_old)

    def commit(self) -> pl.DataFrame:
        entries = self._folder.add_group(self.group)
        self.group.clear()
        self._committed = time.monotonic()
        return entries

    def look(self) -> pl.DataFrame | None:
        """Entries that other processes have added, if it is time to look for them."""
        if time.monotonic() - self._looked < _LOOK_EVERY_S:
            return None
        self._looked = time.monotonic()
        new = self._folder.read_new().filter(pl.col("made_by") == self.group.made_by)
        return new if new.height else None


def _commit_rest(folder: CacheFolder, group: Group) -> None:
    if group:
        folder.add_group(group)


class GrowingLatents:
    """Latents over a cache that may lack samples; missing ones are read and encoded in the calling process."""

    def __init__(
        self,
        cache: LatentCache,
        folder: CacheFolder,
        items: pl.DataFrame,
        *,
        read: Callable[[BatchRequest], Batch],
        encoder: Callable[[], LatentEncoder],
        made_by: str,
        group_size: int = GROUP,
    ) -> None:
        """`read` must leave bad clips out (no replacements); `encoder` is called when the first sample is missing."""
        self._cache, self._read = cache, read
        self._items = items.sort("bucket", "row", maintain_order=True)
        self._make_encoder = encoder
        self._encoder: LatentEncoder | None = None
        self._growth = _Growth(folder, Group(made_by), group_size)
        self._held: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.num_encoded = 0

    @property
    def may_refuse(self) -> bool:
        return True

    def check(self, row: int, bucket: Bucket) -> None:
        """ClipError if this clip cannot be read; encodes it if it is missing."""
        self._ensure(row, bucket)
        self._cache.check(row, bucket)

    def get(self, rows: NDArray[np.int64], bucket: Bucket) -> tuple[Tensor, Tensor]:
        for row in rows.tolist():
            self._ensure(row, bucket)
        held = [self._held.get((row, bucket.index)) for row in rows.tolist()]
        if not any(held):
            return self._cache.get(rows, bucket)
        samples = [part or self._cache.sample(row, bucket) for row, part in zip(rows.tolist(), held, strict=True)]
        return join_latents(samples)

    def flush(self) -> None:
        """Commit what has been encoded; a process that is killed loses what came after the last commit."""
        if self._growth.group:
            self._take_up(self._growth.commit())
            self._held.clear()

    def _ensure(self, row: int, bucket: Bucket) -> None:
        pair = (row, bucket.index)
        if pair in self._held or not self._cache.is_missing(row, bucket):
            return
        if (new := self._growth.look()) is not None:
            self._take_up(new)
            if not self._cache.is_missing(row, bucket):
                return
        self._encode(row, bucket)
        if self._growth.is_due:
            self.flush()

    def _encode(self, row: int, bucket: Bucket) -> None:
        self._encoder = self._encoder or self._make_encoder()
        item = self._items.row(self._cache.locate(row, bucket), named=True)
        state = look_at(item)
        alone = np.array([row], dtype=np.int64)
        batch = self._read(BatchRequest(0, 0, bucket.index, alone, alone))
        group = self._growth.group
        stored = add_latents(group, [item], [state], batch, self._encoder)
        self.num_encoded += 1
        if row in stored:
            self._held[row, bucket.index] = stored[row]
        else:
            self._cache.place(row, bucket.index, {"shard": None, "slot": -1, "crc": 0, "reason": batch.bad[0].reason})

    def _take_up(self, entries: pl.DataFrame) -> None:
        found = self._items.join(entries, on=list(LATENT_KEY), how="inner")
        for entry in found.iter_rows(named=True):
            self._cache.place(entry["row"], entry["bucket"], entry)


class GrowingText:
    """Text over a cache that may lack captions; missing ones are encoded in the calling process."""

    def __init__(
        self,
        cache: TextCache,
        folder: CacheFolder,
        *,
        encode: EncodeText,
        dtype: torch.dtype,
        made_by: str,
        group_size: int = GROUP,
    ) -> None:
        self._cache, self._encode, self._dtype = cache, encode, dtype
        self._growth = _Growth(folder, Group(made_by, ragged=True), group_size)
        self._held: dict[str, dict[str, Tensor]] = {}
        self.num_encoded = 0

    def get(self, captions: list[str]) -> dict[str, Tensor]:
        missing = self._missing(captions)
        if missing and (new := self._growth.look()) is not None:
            self._cache.absorb(new)
            missing = self._missing(captions)
        for caption in missing:
            self._held |= add_captions(self._growth.group, [caption], self._encode, self._dtype)
            self.num_encoded += 1
        held = [self._held.get(caption) for caption in captions]
        if not any(held):
            return self._cache.get(captions)
        samples = [part or self._cache.sample(text) for text, part in zip(captions, held, strict=True)]
        if self._growth.is_due:
            self.flush()
        return join_text(samples)

    def flush(self) -> None:
        """Commit what has been encoded."""
        if self._growth.group:
            self._cache.absorb(self._growth.commit())
            self._held.clear()

    def _missing(self, captions: list[str]) -> list[str]:
        has = self._cache.has(captions)
        absent = [text for text, is_there in zip(captions, has, strict=True) if not is_there]
        return [text for text in dict.fromkeys(absent) if text not in self._held]
