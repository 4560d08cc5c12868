"""Filling a cache ahead of a run, in portions that any number of processes share.

The list of samples is cut into portions that follow from the recipe alone. Ranks take every n-th of them; processes
that do not know of each other claim a portion before they work on it, and the second one skips it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from frameloom.config.schema.data import CacheSection
from frameloom.core.files import digest_value
from frameloom.core.progress import ProgressBar
from frameloom.data.cache.encoding import LatentEncoder, TextEncoder
from frameloom.data.cache.folder import CacheFolder
from frameloom.data.cache.keys import LATENT_COLUMNS, TEXT_COLUMNS, caption_keys, find_latents
from frameloom.data.cache.shards import SHARD_BYTES, Group
from frameloom.data.cache.source_state import SourceState, stat_source
from frameloom.data.loading.batch import Batch, BatchRequest

ReadPixels = Callable[[Iterator[BatchRequest]], Iterable[Batch]]


@dataclass(frozen=True)
class CacheJob:
    """What one call of `frameloom data cache` does; None for `latents` and `text`: what the recipe names.

    `verify` reads all shards that are there and encodes damaged groups again; without it only sizes are compared.
    `prune` drops what the recipe does not need, for one rank alone.
    """

    latents: bool | None = None
    text: bool | None = None
    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    verify: bool = True
    prune: bool = False


@dataclass(frozen=True)
class Filled:
    """What a call did; `num_samples` counts this rank's share of the recipe's."""

    num_samples: int
    num_encoded: int
    num_unreadable: int = 0
    num_pruned: int = 0


def write_latent_cache(
    path: Path,
    items: pl.DataFrame,
    *,
    read_pixels: ReadPixels,
    encoder: LatentEncoder,
    fingerprint: Mapping[str, Any],
    section: CacheSection,
    job: CacheJob | None = None,
) -> Filled:
    """Encode what is missing or stale of `items`.

    `read_pixels` turns requests into batches in the same order, leaving out clips that cannot be read and listing them
    as bad (a `BatchReader` without fallback rows); these are kept in the index with their reason.
    """
    folder = CacheFolder.create(path, "latents", LATENT_COLUMNS)
    made_by = folder.note_fingerprint(fingerprint)
    known = folder.read_file_digests() if section.check_files else None
    num_known = len(known or ())

    def find(part: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
        return find_latents(part, entries, made_by, known)

    def encode(portions: Iterator[pl.DataFrame], group: Group) -> Iterator[tuple[int, bool]]:
        waiting: deque[tuple[list[dict[str, Any]], list[SourceState], bool]] = deque()

        def requests() -> Iterator[BatchRequest]:
            for portion in portions:
                batches = [
                    batch.to_dicts()
                    for same in portion.partition_by("bucket", maintain_order=True)
                    for batch in same.iter_slices(section.batch)
                ]
                for number, batch in enumerate(batches):
                    waiting.append((batch, [stat_source(item) for item in batch], number + 1 == len(batches)))
                    rows = np.array([item["row"] for item in batch], dtype=np.int64)
                    yield BatchRequest(0, number, int(batch[0]["bucket"]), rows, rows)

        for read in read_pixels(requests()):
            batch, states, is_last = waiting.popleft()
            encoder.add(group, batch, states, read)
            yield len(batch), is_last

    filling = _Filling(folder, Group(made_by), find, encode, "latents", section.group, job or CacheJob())
    filled = filling.run(items)
    if known and len(known) > num_known:
        folder.note_file_digests(known)
    return filled


def write_text_cache(
    path: Path,
    captions: Iterable[str],
    *,
    encoder: TextEncoder,
    fingerprint: Mapping[str, Any],
    section: CacheSection,
    job: CacheJob | None = None,
) -> Filled:
    """Encode every different caption and the null prompt "" that is missing."""
    folder = CacheFolder.create(path, "text", TEXT_COLUMNS)
    made_by = folder.note_fingerprint(fingerprint)

    def find(part: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
        ours = entries.filter(pl.col("made_by") == made_by).unique("key", keep="first", maintain_order=True)
        return part.join(ours, on="key", how="left", maintain_order="left")

    def encode(portions: Iterator[pl.DataFrame], group: Group) -> Iterator[tuple[int, bool]]:
        for portion in portions:
            texts = portion["caption"].to_list()
            for start in range(0, len(texts), section.batch):
                part = texts[start : start + section.batch]
                encoder.add(group, part)
                yield len(part), start + len(part) == len(texts)

    group = Group(made_by, ragged=True)
    return _Filling(folder, group, find, encode, "captions", section.group, job or CacheJob()).run(
        caption_keys(captions)
    )


_Portion = tuple[str, pl.DataFrame]
"""A fixed part of the list: its name, the same in all processes with the same work, and what is missing of it."""


@dataclass
class _Filling:
    """One call: finds what is missing, claims portions, commits groups.

    `find` gives items with the entry of each, whose `group` is null where there is none; `encode` fills the group,
    giving (samples done, whether a portion is complete) after each batch.
    """

    folder: CacheFolder
    group: Group
    find: Callable[[pl.DataFrame, pl.DataFrame], pl.DataFrame]
    encode: Callable[[Iterator[pl.DataFrame], Group], Iterator[tuple[int, bool]]]
    title: str
    portion_size: int
    job: CacheJob
    num_encoded: int = 0
    num_unreadable: int = 0
    by_others: list[pl.DataFrame] = field(default_factory=list)

    def run(self, items: pl.DataFrame) -> Filled:
        parts = list(items.iter_slices(self.portion_size))[self.job.rank :: self.job.num_ranks]
        own = pl.concat([items.clear(), *parts])
        entries = self.folder.read_index()
        placed = self.find(own, entries)
        if damaged := self.folder.find_damaged(placed, read=self.job.verify):
            self.folder.drop_damaged(entries, damaged)
            placed = self.find(own, self.folder.read_index())
        portions: list[_Portion] = []
        start = 0
        for part in parts:
            missing = part.filter(placed["group"].slice(start, part.height).is_null())
            start += part.height
            name = digest_value([self.group.made_by, part.height, part.row(0)])[:32]
            portions += [(name, missing)] if missing.height else []
        num_missing = sum(missing.height for _, missing in portions)
        with ProgressBar(self.title, own.height, done=own.height - num_missing) as bar:
            for portion in self._pass(portions, bar):
                # One at a time: a process that waits for another must hold nothing that the other may wait for.
                self._pass([portion], bar, wait=True)
        num_pruned = 0
        if self.job.prune:
            needed = self.find(own, self.folder.read_index()).filter(pl.col("group").is_not_null())
            num_pruned = self.folder.prune(needed)
        self.folder.merge_index(placed)
        return Filled(own.height, self.num_encoded, self.num_unreadable, num_pruned)

    def _pass(self, portions: list[_Portion], bar: ProgressBar, *, wait: bool = False) -> list[_Portion]:
        """Do the portions that no other process has claimed; returns the rest."""
        left: list[_Portion] = []
        claims: deque[ExitStack] = deque()
        started_s, num_before = time.monotonic(), self.num_encoded
        with ExitStack() as everything:

            def claimed() -> Iterator[pl.DataFrame]:
                for name, missing in portions:
                    claim = everything.enter_context(ExitStack())
                    if not claim.enter_context(self.folder.claim(name, wait=wait)):
                        left.append((name, missing))
                        continue
                    # Without what other processes have committed meanwhile.
                    rest, new = missing, self.folder.read_new()
                    self.by_others += [new] if new.height else []
                    if self.by_others:
                        rest = missing.filter(self.find(missing, pl.concat(self.by_others))["group"].is_null())
                    bar.advance(missing.height - rest.height)
                    if rest.height:
                        claims.append(claim)
                        yield rest
                    else:
                        claim.close()

            for num_samples, is_last in self.encode(claimed(), self.group):
                self.num_encoded += num_samples
                self.num_unreadable += sum(entry["stack"] is None for entry in self.group.entries[-num_samples:])
                rate = (self.num_encoded - num_before) / max(time.monotonic() - started_s, 1e-9)
                bar.advance(num_samples, f"{rate:.1f}/s" if sys.stderr.isatty() else "")
                if is_last or self.group.num_bytes >= SHARD_BYTES:
                    self.folder.add_group(self.group)
                    self.group.clear()
                if is_last:
                    claims.popleft().close()
        return left
