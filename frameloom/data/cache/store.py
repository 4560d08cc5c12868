"""Latent and text stores: outputs of the frozen encoders, computed once, or on demand while training.

Both look samples up by an int64 key in a table and read them from mapped shards; the bytes of a sample are checked when
a process first reads it. A store holds only what it was opened for: a stale sample is never read. One that grows
encodes what is missing when a batch asks for it. Nothing is sent between ranks: each commits its own whole groups
and looks for those of the others before it encodes. A run gets the same samples as from a full cache, because a sample
is encoded alone in both.
Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.errors import CacheError
from frameloom.core.files import spill
from frameloom.data.buckets.policy import Bucket
from frameloom.data.cache.encoding import TEXT_STACK, LatentEncoder, Sample, TextEncoder, latent_stack
from frameloom.data.cache.folder import SHARDS, CacheFolder, name_fingerprint
from frameloom.data.cache.keys import (
    LATENT_COLUMNS,
    LATENT_KEY,
    TEXT_COLUMNS,
    caption_key,
    caption_keys,
    explain_latents,
    explain_text,
    find_latents,
)
from frameloom.data.cache.shards import REBUILD, SHARD_BYTES, Group
from frameloom.data.cache.source_state import stat_source
from frameloom.data.loading.batch import Batch, BatchRequest
from frameloom.data.media.decode import ClipError

_GROUP_SAMPLES = 64
_LOOK_EVERY_S = 10.0
_COMMIT_EVERY_S = 60.0
_KEPT_BYTES = 64 * 2**20
# Aligned, so that a search in the keys needs no copy of them.
_ENTRY_DTYPE = np.dtype([("key", "<i8"), ("shard", "<i4"), ("slot", "<i4"), ("crc", "<u4")], align=True)
_BAD, _MISSING = -1, -2
# Larger tables travel to worker processes as a memory-mapped file that all of them share.
_INLINE_BYTES = 4 * 2**20
_ROW_BITS = 40
_NUM_SHOWN = 8


class SharedTable:
    """An array that is the same memory in all processes that it is pickled to, unless it is small."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self.rows = rows
        self._file: Path | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self.rows.nbytes <= _INLINE_BYTES:
            return {"rows": np.asarray(self.rows)}
        if self._file is None:
            self._file = spill(self, ".npy", lambda path: np.save(path, self.rows))
        return {"file": self._file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._file = None
        self.rows = np.load(state["file"], mmap_mode="r") if "file" in state else state["rows"]


class SampleStore:
    """Samples by key; `grows` commits what `_encode` adds to `_group`, large or old groups and the last one at exit.

    A copy in a worker process shares the table and the mapped shards, and does not grow.
    """

    def __init__(self, folder: CacheFolder, made_by: str, *, ragged: bool = False, grows: bool = False) -> None:
        self.path = folder.path
        self.num_encoded = 0
        # The lock of the folder stays with the process that opened it, which outlives its workers.
        self._folder: CacheFolder | None = folder
        self._shards = folder.shards
        self._shard_names: list[str] = []
        self._table = SharedTable(np.empty(0, dtype=_ENTRY_DTYPE))
        self._checked = np.zeros(0, dtype=bool)
        self._group = Group(made_by, ragged) if grows else None
        self._held: dict[int, Sample] = {}  # by key: encoded, and not committed yet
        self._looked_s = self._committed_s = time.monotonic()
        if self._group is not None:
            weakref.finalize(self, _commit, folder, self._group)

    def _absorb(self, keys: NDArray[np.int64], entries: pl.DataFrame) -> None:
        """Take up entries: those of known keys in place, others in a new table."""
        numbers = {name: number for number, name in enumerate(self._shard_names)}
        for name in entries["shard"].drop_nulls().unique(maintain_order=True):
            numbers.setdefault(name, len(numbers))
        self._shard_names = list(numbers)
        number = pl.col("shard").replace_strict(numbers, return_dtype=pl.Int32, default=_BAD)
        new = np.empty(len(keys), dtype=_ENTRY_DTYPE)
        new["key"] = keys
        new["shard"] = entries.select(pl.when(pl.col("group").is_null()).then(_MISSING).otherwise(number)).to_series()
        new["slot"], new["crc"] = entries["slot"].fill_null(-1).to_numpy(), entries["crc"].fill_null(0).to_numpy()
        at = self._find(keys)
        self._table.rows[at[at >= 0]] = new[at >= 0]
        self._checked[at[at >= 0]] = False
        if (at < 0).any():
            table = np.concatenate([self._table.rows, new[at < 0]])
            _, first = np.unique(table["key"], return_index=True)
            self._table = SharedTable(table[first])
            self._checked = np.zeros(len(first), dtype=bool)

    def _find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index of each key in the table, -1 for a missing one."""
        known = self._table.rows["key"]
        if not len(known):
            return np.full(len(keys), -1)
        at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        return np.where(known[at] == keys, at, -1)

    def _sample(self, at: int, stack: str) -> Sample:
        """One sample; its bytes are checked when this process reads it for the first time."""
        entry = self._table.rows[at]
        crc = None if self._checked[at] else int(entry["crc"])
        sample = self._shards.sample(self._shard_names[entry["shard"]], stack, int(entry["slot"]), crc)
        self._checked[at] = True
        return {name: part.restore() for name, part in sample.items()}

    def _complete(self, keys: NDArray[np.int64], encode: Callable[[int], Sample | None]) -> None:
        """Encode what is missing of `keys`; `encode(n)` adds that of the n-th key to the group."""
        if self._group is None:
            return
        missing = self._list_missing(keys)
        if missing and time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            assert self._folder is not None
            self._take_up(self._folder.read_new().filter(pl.col("made_by") == self._group.made_by))
            missing = self._list_missing(keys)
        for number in missing:
            key = int(keys[number])
            if key not in self._held:
                self.num_encoded += 1
                sample = encode(number)
                if sample is not None:
                    self._held[key] = sample
        is_old = time.monotonic() - self._committed_s > _COMMIT_EVERY_S
        is_large = len(self._group) >= _GROUP_SAMPLES or self._group.num_bytes >= SHARD_BYTES
        if self._group and (is_large or is_old):
            self.flush()

    def _list_missing(self, keys: NDArray[np.int64]) -> list[int]:
        at = self._find(keys)
        is_missing = at < 0
        is_missing[~is_missing] = self._table.rows["shard"][at[~is_missing]] == _MISSING
        return [number for number in np.flatnonzero(is_missing).tolist() if int(keys[number]) not in self._held]

    def flush(self) -> None:
        """Commit what has been encoded; a process that is killed loses what came after the last commit."""
        if self._group:
            assert self._folder is not None
            self._take_up(_commit(self._folder, self._group))
            self._committed_s = time.monotonic()
            self._held.clear()

    def _take_up(self, entries: pl.DataFrame) -> None:
        """Entries that were added to the folder after opening."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_folder": None, "_checked": None, "_group": None, "_held": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._checked = np.zeros(len(self._table.rows), dtype=bool)


def _commit(folder: CacheFolder, group: Group) -> pl.DataFrame:
    if not group:
        return pl.DataFrame()
    entries = folder.add_group(group)
    group.clear()
    return entries


Growth = tuple[Callable[[BatchRequest], Batch], Callable[[], LatentEncoder]]
"""How missing latents are made: a reader that leaves bad clips out, and what makes the encoder for the first one."""


class LatentStore(SampleStore):
    """Latents by (row, bucket)."""

    def __init__(self, folder: CacheFolder, made_by: str, placed: pl.DataFrame, growth: Growth | None) -> None:
        super().__init__(folder, made_by, grows=growth is not None)
        self.num_missing = int(placed["group"].is_null().sum())
        keys = placed["row"].to_numpy() + (placed["bucket"].to_numpy().astype(np.int64) << _ROW_BITS)
        self._absorb(keys, placed)
        bad = placed.filter(pl.col("reason").is_not_null())
        self._reasons = {(row, bucket): text for row, bucket, text in bad.select("row", "bucket", "reason").rows()}
        # In the order of the table.
        self._items = None if growth is None else placed.sort("bucket", "row", maintain_order=True)
        self._growth = growth
        self._encoder: LatentEncoder | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        fingerprint: Mapping[str, Any],
        items: pl.DataFrame,
        *,
        check_files: bool = True,
        growth: Growth | None = None,
    ) -> Self:
        """CacheError if a latent of `items` is missing or stale, with what differs; with `growth` it is encoded."""
        if growth is None:
            folder = CacheFolder.open(path, "latents", LATENT_COLUMNS)
        else:
            folder = CacheFolder.create(path, "latents", LATENT_COLUMNS)
            folder.note_fingerprint(fingerprint)
        entries, made_by = folder.read_index(), name_fingerprint(fingerprint)
        known = folder.read_file_digests() if check_files else None
        num_known = len(known or ())
        placed = find_latents(items, entries, made_by, known)
        if known and len(known) > num_known:
            folder.note_file_digests(known)
        _refuse_damaged(folder, placed)
        if growth is None and placed["group"].null_count():
            raise CacheError("\n".join(explain_latents(folder, fingerprint, placed, entries)))
        return cls(folder, made_by, placed, growth)

    @property
    def bad(self) -> dict[int, str]:
        """Rows that could not be read when the cache was written, with the reason."""
        return {row: reason for (row, _), reason in self._reasons.items()}

    @property
    def may_refuse(self) -> bool:
        """Whether there may be rows that `check` refuses."""
        return bool(self._reasons) or self._group is not None

    def check(self, row: int, bucket: Bucket) -> None:
        """ClipError if this clip was bad when it was encoded, which is now if it is missing and the store grows."""
        self._encode_missing(np.array([row], dtype=np.int64), bucket)
        if (reason := self._reasons.get((row, bucket.index))) is not None:
            raise ClipError(str(reason))

    def get(self, rows: NDArray[np.int64], bucket: Bucket) -> tuple[Tensor, Tensor]:
        """(mean, standard deviation), each [B, C, F, H, W]; zeros for an encoder or a cache without deviation."""
        keys, stack = self._encode_missing(rows, bucket), latent_stack(bucket)
        at = self._find(keys)
        shards = self._table.rows["shard"][at]
        is_held = np.array([int(key) in self._held for key in keys]) if self._held else np.zeros(len(keys), dtype=bool)
        if (wrong := ((at < 0) | (shards < 0)) & ~is_held).any():
            shown = rows[wrong].tolist()[:_NUM_SHOWN]
            raise CacheError(f"{self.path}: no latent for rows {shown} in bucket {bucket.name}; {REBUILD}")
        if is_held.any():
            samples = [
                self._held.get(int(key)) or self._sample(int(one), stack) for key, one in zip(keys, at, strict=True)
            ]
            stored = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        else:
            for one in at[~self._checked[at]].tolist():
                self._sample(one, stack)
            # Shard by shard: one call copies many samples.
            found = self._table.rows[at]
            parts = [np.flatnonzero(found["shard"] == number) for number in np.unique(found["shard"])]
            gathered = [
                self._shards.gather(self._shard_names[found["shard"][part[0]]], stack, found["slot"][part])
                for part in parts
            ]
            stored = gathered[0]
            if len(gathered) > 1:
                back = torch.from_numpy(np.argsort(np.concatenate(parts)))
                stored = {name: torch.cat([part[name] for part in gathered])[back] for name in stored}
        mean = stored["mean"] if "mean" in stored else stored["sample"]
        return mean, stored["std"] if "std" in stored else torch.zeros_like(mean)

    def _encode_missing(self, rows: NDArray[np.int64], bucket: Bucket) -> NDArray[np.int64]:
        """The keys of these rows."""
        keys: NDArray[np.int64] = rows + (bucket.index << _ROW_BITS)

        def encode(number: int) -> Sample | None:
            assert self._items is not None and self._growth is not None and self._group is not None
            read, make_encoder = self._growth
            self._encoder = self._encoder or make_encoder()
            item = self._items.row(int(self._find(keys[[number]])[0]), named=True)
            state, row = stat_source(item), rows[[number]]
            batch = read(BatchRequest(0, 0, bucket.index, row, row))
            stored = self._encoder.add(self._group, [item], [state], batch)
            if item["row"] not in stored:
                self._reasons[item["row"], bucket.index] = batch.bad[0].reason
                self._table.rows["shard"][self._find(keys[[number]])] = _BAD
            return stored.get(item["row"])

        self._complete(keys, encode)
        return keys

    def _take_up(self, entries: pl.DataFrame) -> None:
        if self._items is None or not entries.height:
            return
        found = self._items.select("row", "bucket", *LATENT_KEY).join(entries, on=list(LATENT_KEY), how="inner")
        self._absorb(found["row"].to_numpy() + (found["bucket"].to_numpy().astype(np.int64) << _ROW_BITS), found)
        bad = found.filter(pl.col("reason").is_not_null())
        self._reasons |= {(row, bucket): text for row, bucket, text in bad.select("row", "bucket", "reason").rows()}


class TextStore(SampleStore):
    """Text embeddings by caption; frequent ones are kept stacked in memory."""

    def __init__(self, folder: CacheFolder, made_by: str, entries: pl.DataFrame, encoder: TextEncoder | None) -> None:
        super().__init__(folder, made_by, ragged=True, grows=encoder is not None)
        self._encoder = encoder
        self._kept = _KeptSamples()
        self._take_up(entries)

    @classmethod
    def open(
        cls,
        path: Path,
        fingerprint: Mapping[str, Any],
        *,
        captions: Iterable[str] = (),
        encoder: TextEncoder | None = None,
    ) -> Self:
        """CacheError if one of `captions` is missing or stale, with what differs; with `encoder` it is encoded."""
        if encoder is None:
            folder = CacheFolder.open(path, "text", TEXT_COLUMNS)
        else:
            folder = CacheFolder.create(path, "text", TEXT_COLUMNS)
            folder.note_fingerprint(fingerprint)
        entries, made_by = folder.read_index(), name_fingerprint(fingerprint)
        ours = entries.filter(pl.col("made_by") == made_by)
        _refuse_damaged(folder, ours)
        wanted = caption_keys(captions) if encoder is None else caption_keys([]).clear()
        missing = wanted.join(ours, on="key", how="anti")
        if missing.height:
            raise CacheError("\n".join(explain_text(folder, fingerprint, missing, wanted.height, entries)))
        return cls(folder, made_by, ours, encoder)

    @property
    def is_complete(self) -> bool:
        """Whether the store holds every caption of the recipe, and will not grow."""
        return self._encoder is None

    def get(self, captions: list[str]) -> Sample:
        """The stored tensors of these captions, stacked in their order."""
        if (kept := self._kept.recall(captions)) is not None:
            return kept
        keys = np.array([caption_key(caption) for caption in captions], dtype=np.int64)

        def encode(number: int) -> Sample:
            assert self._encoder is not None and self._group is not None
            return self._encoder.add(self._group, [captions[number]])[0]

        self._complete(keys, encode)
        samples = []
        for caption, key, at in zip(captions, keys.tolist(), self._find(keys).tolist(), strict=True):
            if at < 0 and key not in self._held:
                missing = sum(one < 0 for one in self._find(keys).tolist())
                raise CacheError(f"{self.path}: no embedding for {missing} captions, first {caption!r}; {REBUILD}")
            samples.append(self._held[key] if key in self._held else self._sample(at, TEXT_STACK))
            self._kept.add(caption, samples[-1])
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def _take_up(self, entries: pl.DataFrame) -> None:
        if entries.height:
            self._absorb(entries["key"].to_numpy(), entries)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_kept": _KeptSamples(), "_encoder": None}


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

    def recall(self, captions: Sequence[str]) -> Sample | None:
        """The samples of these captions stacked in their order; None if one is not kept."""
        rows = [self._rows.get(caption, -1) for caption in captions]
        if not rows or min(rows) < 0:
            return None
        index = torch.tensor(rows)
        return {name: block.index_select(0, index) for name, block in self._blocks.items()}


def _refuse_damaged(folder: CacheFolder, entries: pl.DataFrame) -> None:
    """Sizes only: the bytes of a sample are checked when it is read."""
    damaged = folder.find_damaged(entries, read=False)
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise CacheError(f"{folder.path / SHARDS / damaged[0]}: cut short, too long or missing{more}; {REBUILD}")
