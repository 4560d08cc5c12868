"""Latent and text caches: outputs of the frozen encoders, computed once.

Both answer by (row, bucket) or by caption from mapped shards; a sample's bytes are checked when a process first reads
it. A cache holds only what it was opened for: a stale sample is never read.
Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.errors import CacheError
from frameloom.data.buckets.policy import Bucket
from frameloom.data.cache.folder import SHARDS, CacheFolder, name_fingerprint
from frameloom.data.cache.keys import (
    LATENT_COLUMNS,
    TEXT_COLUMNS,
    caption_key,
    caption_keys,
    explain_latents,
    explain_text,
    find_latents,
)
from frameloom.data.cache.shards import REBUILD, ShardReader
from frameloom.data.media.decode import ClipError

TEXT_STACK = "text"
_KEPT_BYTES = 64 * 2**20
OnMissing = Literal["refuse", "allow"]
_PLACES = np.dtype([("key", "<i8"), ("shard", "<i4"), ("slot", "<i4"), ("crc", "<u4")])
_BAD, _MISSING = -1, -2
# Larger tables travel to worker processes as a memory-mapped file that all of them share.
_INLINE_BYTES = 4 * 2**20


class SharedTable:
    """An array that is the same memory in all processes that it is pickled to, unless it is small."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self.rows = rows
        self._file: Path | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self.rows.nbytes <= _INLINE_BYTES:
            return {"rows": np.asarray(self.rows)}
        if self._file is None:
            descriptor, name = tempfile.mkstemp(prefix="frameloom-cache-", suffix=".npy")
            os.close(descriptor)
            self._file = Path(name)
            weakref.finalize(self, self._file.unlink, missing_ok=True)
            np.save(self._file, self.rows)
        return {"file": self._file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._file = None
        self.rows = np.load(state["file"], mmap_mode="r") if "file" in state else state["rows"]


def latent_stack(bucket: Bucket) -> str:
    return f"{bucket.frames}x{bucket.height}x{bucket.width}"


class LatentCache:
    """Latents by (row, bucket). A copy in a worker process shares the table and the mapped shards."""

    def __init__(self, folder: CacheFolder, placed: pl.DataFrame) -> None:
        self.path = folder.path
        self.num_missing = int(placed["group"].is_null().sum())
        self._folder: CacheFolder | None = folder
        self._shards = folder.shards
        self._names: list[str] = placed["shard"].drop_nulls().unique(maintain_order=True).to_list()
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._spans: dict[int, tuple[int, int]] = {}
        self._table = SharedTable(self._make_table(placed))
        self._checked = np.zeros(len(self._table.rows), dtype=bool)
        bad = placed.filter(pl.col("reason").is_not_null())
        self._reasons = {(row, bucket): text for row, bucket, text in bad.select("row", "bucket", "reason").rows()}

    def _make_table(self, placed: pl.DataFrame) -> NDArray[Any]:
        """Rows of each bucket together, sorted; `pairs` come like this already."""
        placed = placed.sort("bucket", "row", maintain_order=True)
        table = np.empty(placed.height, dtype=_PLACES)
        number = pl.col("shard").replace_strict(self._numbers, return_dtype=pl.Int32, default=_BAD)
        shard = placed.select(pl.when(pl.col("group").is_null()).then(_MISSING).otherwise(number)).to_series()
        table["key"], table["shard"] = placed["row"].to_numpy(), shard.to_numpy()
        table["slot"], table["crc"] = placed["slot"].fill_null(-1).to_numpy(), placed["crc"].fill_null(0).to_numpy()
        buckets, first = np.unique(placed["bucket"].to_numpy(), return_index=True)
        ends = [*first[1:].tolist(), placed.height]
        self._spans = {int(b): (int(start), end) for b, start, end in zip(buckets, first, ends, strict=True)}
        return table

    @classmethod
    def open(
        cls,
        path: Path,
        fingerprint: Mapping[str, Any],
        items: pl.DataFrame,
        *,
        check_files: bool = True,
        on_missing: OnMissing = "refuse",
    ) -> Self:
        """CacheError if a latent of `items` is missing or stale, with what differs."""
        folder = CacheFolder.open(path, "latents", LATENT_COLUMNS)
        entries = folder.read_index()
        known = folder.read_file_digests() if check_files else None
        num_known = len(known or ())
        placed = find_latents(items, entries, name_fingerprint(fingerprint), known)
        if known and len(known) > num_known:
            folder.note_file_digests(known)
        _refuse_damaged(folder, placed)
        if on_missing == "refuse" and placed["group"].null_count():
            raise CacheError("\n".join(explain_latents(folder, fingerprint, placed, entries)))
        return cls(folder, placed)

    @property
    def bad(self) -> dict[int, str]:
        """Rows that could not be read when the cache was written, with the reason."""
        return {row: reason for (row, _), reason in self._reasons.items()}

    @property
    def may_refuse(self) -> bool:
        """Whether a clip was bad when the cache was written."""
        return bool(self._reasons)

    def check(self, row: int, bucket: Bucket) -> None:
        """ClipError if this clip was bad when the cache was written."""
        if (reason := self._reasons.get((row, bucket.index))) is not None:
            raise ClipError(str(reason))

    def locate(self, row: int, bucket: Bucket) -> int:
        """The place of a latent among all items, sorted by bucket and row."""
        return int(self._find(np.array([row]), bucket)[0])

    def is_missing(self, row: int, bucket: Bucket) -> bool:
        return bool(self._table.rows["shard"][self.locate(row, bucket)] == _MISSING)

    def place(self, row: int, bucket: int, entry: Mapping[str, Any]) -> None:
        """Take up a sample that was added to the folder after opening."""
        start, end = self._spans[bucket]
        at = start + int(np.searchsorted(self._table.rows["key"][start:end], row))
        shard = entry["shard"]
        if shard is None:
            self._reasons[row, bucket] = str(entry["reason"])
            number = _BAD
        else:
            number = self._numbers.setdefault(shard, len(self._names))
            if number == len(self._names):
                self._names.append(shard)
        self._table.rows[at] = (row, number, entry["slot"], entry["crc"])

    def get(self, rows: NDArray[np.int64], bucket: Bucket) -> tuple[Tensor, Tensor]:
        """(mean, standard deviation), each [B, C, F, H, W]; zeros for an encoder or a cache without deviation."""
        places, stack = self._find(rows, bucket), latent_stack(bucket)
        shards = self._table.rows["shard"][places]
        if (shards < 0).any():
            wrong = rows[shards < 0].tolist()[:8]
            raise CacheError(f"{self.path}: no latent for rows {wrong} in bucket {bucket.name}; {REBUILD}")
        for at in places[~self._checked[places]].tolist():
            self._take(at, stack)
        return _mean_and_deviation(self._gather(places, stack))

    def _gather(self, places: NDArray[np.int64], stack: str) -> dict[str, Tensor]:
        """Samples of one bucket, copied shard by shard: one call for many of them."""
        found = self._table.rows[places]
        numbers = np.unique(found["shard"])
        parts = [np.flatnonzero(found["shard"] == number) for number in numbers]
        gathered = [
            self._shards.gather(self._names[number], stack, found["slot"][part])
            for number, part in zip(numbers, parts, strict=True)
        ]
        if len(gathered) == 1:
            return gathered[0]
        back = torch.from_numpy(np.argsort(np.concatenate(parts)))
        return {name: torch.cat([part[name] for part in gathered])[back] for name in gathered[0]}

    def sample(self, row: int, bucket: Bucket) -> dict[str, Tensor]:
        """The tensors of one latent as they are stored."""
        return self._take(self.locate(row, bucket), latent_stack(bucket))

    def _take(self, at: int, stack: str) -> dict[str, Tensor]:
        return _take(self._shards, self._names, self._table.rows, self._checked, at, stack)

    def _find(self, rows: NDArray[np.int64], bucket: Bucket) -> NDArray[np.int64]:
        start, end = self._spans.get(bucket.index, (0, 0))
        known = self._table.rows["key"][start:end]
        places = np.searchsorted(known, rows)
        found = places < len(known)
        found[found] = known[places[found]] == rows[found]
        if not found.all():
            wrong = rows[~found].tolist()[:8]
            raise CacheError(f"{self.path}: no latent for rows {wrong} in bucket {bucket.name}; {REBUILD}")
        return places + start

    def __getstate__(self) -> dict[str, Any]:
        # The lock of the folder stays with the process that opened it, which outlives its workers.
        return self.__dict__ | {"_folder": None, "_checked": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._checked = np.zeros(len(self._table.rows), dtype=bool)


def join_latents(samples: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Stored samples as a batch of mean and standard deviation."""
    return _mean_and_deviation({name: torch.stack([sample[name] for sample in samples]) for name in samples[0]})


def _mean_and_deviation(stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    mean = stored["mean"] if "mean" in stored else stored["sample"]
    return mean, stored["std"] if "std" in stored else torch.zeros_like(mean)


def _take(
    shards: ShardReader, names: list[str], table: NDArray[Any], checked: NDArray[np.bool_], at: int, stack: str
) -> dict[str, Tensor]:
    """One sample; its bytes are checked when this process reads it for the first time."""
    place = table[at]
    crc = None if checked[at] else int(place["crc"])
    sample = shards.sample(names[place["shard"]], stack, int(place["slot"]), crc)
    checked[at] = True
    return {name: part.restore() for name, part in sample.items()}


class TextCache:
    """Text embeddings by caption. A copy in a worker process shares the table and the mapped shards."""

    def __init__(self, folder: CacheFolder, entries: pl.DataFrame) -> None:
        self.path = folder.path
        self._folder: CacheFolder | None = folder
        self._shards = folder.shards
        self._names: list[str] = []
        self._table = SharedTable(np.empty(0, dtype=_PLACES))
        self.absorb(entries)

    @classmethod
    def open(
        cls,
        path: Path,
        fingerprint: Mapping[str, Any],
        *,
        captions: Iterable[str] = (),
        on_missing: OnMissing = "refuse",
    ) -> Self:
        """CacheError if an embedding of `captions` is missing or stale, with what differs."""
        folder = CacheFolder.open(path, "text", TEXT_COLUMNS)
        entries = folder.read_index()
        ours = entries.filter(pl.col("made_by") == name_fingerprint(fingerprint))
        _refuse_damaged(folder, ours)
        wanted = caption_keys(captions)
        missing = wanted.join(ours, on="key", how="anti")
        if on_missing == "refuse" and missing.height:
            raise CacheError("\n".join(explain_text(folder, fingerprint, missing, wanted.height, entries)))
        return cls(folder, ours)

    def absorb(self, entries: pl.DataFrame) -> None:
        """Take up samples, also such that were added to the folder after opening."""
        numbers = {name: number for number, name in enumerate(self._names)}
        new = np.empty(entries.height, dtype=_PLACES)
        new["key"], new["slot"] = entries["key"].to_numpy(), entries["slot"].to_numpy()
        new["crc"] = entries["crc"].to_numpy()
        new["shard"] = [numbers.setdefault(name, len(numbers)) for name in entries["shard"].to_list()]
        self._names = list(numbers)
        table = np.concatenate([self._table.rows, new])
        _, first = np.unique(table["key"], return_index=True)
        self._table = SharedTable(table[first])
        self._checked = np.zeros(len(first), dtype=bool)
        self._kept = _KeptSamples()

    def has(self, captions: Sequence[str]) -> NDArray[np.bool_]:
        return self._find(captions) >= 0

    def get(self, captions: list[str]) -> dict[str, Tensor]:
        """The stored tensors of these captions, stacked in their order."""
        if (kept := self._kept.recall(captions)) is not None:
            return kept
        places = self._find(captions)
        if (places < 0).any():
            first = captions[int(np.flatnonzero(places < 0)[0])]
            raise CacheError(
                f"{self.path}: no embedding for {int((places < 0).sum())} captions, first {first!r}; {REBUILD}"
            )
        samples = [self._sample(int(at)) for at in places]
        for caption, sample in zip(captions, samples, strict=True):
            self._kept.add(caption, sample)
        return join_text(samples)

    def sample(self, caption: str) -> dict[str, Tensor]:
        """The tensors of one caption."""
        return self._sample(int(self._find([caption])[0]))

    def _sample(self, at: int) -> dict[str, Tensor]:
        return _take(self._shards, self._names, self._table.rows, self._checked, at, TEXT_STACK)

    def _find(self, captions: Sequence[str]) -> NDArray[np.int64]:
        wanted = np.array([caption_key(caption) for caption in captions], dtype=np.int64)
        known = self._table.rows["key"]
        if not len(known):
            return np.full(len(wanted), -1)
        places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        return np.where(known[places] == wanted, places, -1)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_folder": None, "_checked": None, "_kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._checked = np.zeros(len(self._table.rows), dtype=bool)
        self._kept = _KeptSamples()


class _KeptSamples:
    """A small in-memory cache of captions, stacked in one block so that one call gathers a batch."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._blocks: dict[str, Tensor] = {}

    def add(self, caption: str, sample: Mapping[str, Tensor]) -> None:
        """Keep a sample, unless the block is full or holds samples of other shapes."""
        count, size = len(self._rows), sum(part.nbytes for part in sample.values())
        if caption in self._rows or (count + 1) * size > _KEPT_BYTES:
            return
        if not self._blocks:
            self._blocks = {name: part.new_empty((16, *part.shape)) for name, part in sample.items()}
        if any(part.shape != self._blocks[name].shape[1:] for name, part in sample.items()):
            return
        if count == len(next(iter(self._blocks.values()))):
            self._blocks = {name: torch.cat([block, torch.empty_like(block)]) for name, block in self._blocks.items()}
        for name, part in sample.items():
            self._blocks[name][count] = part
        self._rows[caption] = count

    def recall(self, captions: Sequence[str]) -> dict[str, Tensor] | None:
        """The samples of these captions stacked in their order; None if one is not kept."""
        rows = [self._rows.get(caption, -1) for caption in captions]
        if not rows or min(rows) < 0:
            return None
        index = torch.tensor(rows)
        return {name: block.index_select(0, index) for name, block in self._blocks.items()}


def join_text(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def _refuse_damaged(folder: CacheFolder, entries: pl.DataFrame) -> None:
    """Sizes only: the bytes of a sample are checked when it is read."""
    damaged = folder.find_damaged(entries, read=False)
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise CacheError(f"{folder.path / SHARDS / damaged[0]}: cut short, too long or missing{more}; {REBUILD}")
