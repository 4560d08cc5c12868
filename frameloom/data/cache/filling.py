"""Filling a cache ahead of a run, in portions that any number of processes share.

The list of samples is cut into portions that follow from the recipe alone. Ranks take every n-th of them; processes
that do not know of each other claim a portion before they work on it, and the second one skips it.
Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from frameloom.core.errors import CacheError
from frameloom.core.files import digest_value
from frameloom.core.progress import ProgressBar
from frameloom.core.random import stream
from frameloom.data.cache.cache import TEXT_STACK, latent_stack
from frameloom.data.cache.folder import CacheFolder
from frameloom.data.cache.keys import (
    LATENT_COLUMNS,
    LATENT_KEY,
    TEXT_COLUMNS,
    Store,
    caption_key,
    caption_keys,
    find_latents,
)
from frameloom.data.cache.shards import SHARD_BYTES, Group
from frameloom.data.cache.source_state import SourceState, describe_source, look_at
from frameloom.data.loading.batch import Batch, BatchRequest

PORTION = 1024

ReadPixels = Callable[[Iterator[BatchRequest]], Iterable[Batch]]


@dataclass(frozen=True)
class FillSettings:
    """How a cache is filled, not what is in it; `portion` is the most samples that a killed process loses.

    `verify` reads all shards that are there and encodes damaged groups again; without it only sizes are compared.
    `prune` drops what the recipe does not need, for one rank alone. `batch` above 1 encodes
    several samples at once: faster on some devices, but the last bits of a result may then depend on its neighbours.
    """

    batch: int = 1
    portion: int = PORTION
    shard_bytes: int = SHARD_BYTES
    rank: int = 0
    num_ranks: int = 1
    check_files: bool = True
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
    settings: FillSettings | None = None,
) -> Filled:
    """Encode what is missing or stale of `items`.

    `read_pixels` turns requests into batches in the same order, leaving out clips that cannot be read and listing them
    as bad (a `ClipReader` with no replacements); these are kept in the index with their reason.
    """
    settings = settings or FillSettings()
    folder = CacheFolder.create(path, "latents", LATENT_COLUMNS)
    made_by = folder.note_fingerprint(fingerprint)

    known = folder.read_file_digests() if settings.check_files else None
    num_known = len(known or ())

    def find(part: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
        return find_latents(part, entries, made_by, known)

    work = _LatentWork(read_pixels, encoder, settings.batch)
    filled = _Filling(folder, Group(made_by), find, work, "latents", settings).run(items)
    if known and len(known) > num_known:
        folder.note_file_digests(known)
    return filled


def write_text_cache(
    path: Path,
    captions: Iterable[str],
    *,
    encode: EncodeText,
    fingerprint: Mapping[str, Any],
    dtype: torch.dtype,
    settings: FillSettings | None = None,
) -> Filled:
    """Encode every different caption and the null prompt "" that is missing.

    `encode` gives tensors [B, ...] by name, of the same shape for every batch; those that are not floating point
    (masks, token ids) keep their type.
    """
    settings = settings or FillSettings()
    folder = CacheFolder.create(path, "text", TEXT_COLUMNS)
    made_by = folder.note_fingerprint(fingerprint)

    def find(part: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
        return find_text(part, entries, made_by)

    work = _TextWork(encode, dtype, settings.batch)
    return _Filling(folder, Group(made_by, ragged=True), find, work, "captions", settings).run(caption_keys(captions))


def find_text(captions: pl.DataFrame, entries: pl.DataFrame, made_by: str) -> pl.DataFrame:
    """`captions` with the entry of each; `group` is null where there is none."""
    ours = entries.filter(pl.col("made_by") == made_by).unique("key", keep="first", maintain_order=True)
    return captions.join(ours, on="key", how="left", maintain_order="left")


class _LatentWork:
    """Encodes clips."""

    def __init__(self, read: ReadPixels, encoder: LatentEncoder, batch: int) -> None:
        self._read, self._encoder, self._batch = read, encoder, batch
        self._states: deque[list[SourceState]] = deque()

    def do(self, portions: Iterator[pl.DataFrame], group: Group) -> Iterator[tuple[int, bool]]:
        """Fill `group`, giving (samples done, whether a portion is complete) after each batch."""
        waiting: deque[tuple[list[dict[str, Any]], bool]] = deque()

        def requests() -> Iterator[BatchRequest]:
            for portion in portions:
                batches = [
                    batch.to_dicts()
                    for same in portion.partition_by("bucket", maintain_order=True)
                    for batch in same.iter_slices(self._batch)
                ]
                for number, batch in enumerate(batches):
                    waiting.append((batch, number + 1 == len(batches)))
                    self._states.append([look_at(item) for item in batch])
                    rows = np.array([item["row"] for item in batch], dtype=np.int64)
                    yield BatchRequest(0, number, int(batch[0]["bucket"]), rows, rows)

        for read in self._read(requests()):
            items, is_last = waiting.popleft()
            self._add(items, read, group)
            yield len(items), is_last

    def _add(self, items: list[dict[str, Any]], read: Batch, group: Group) -> None:
        add_latents(group, items, self._states.popleft(), read, self._encoder)


class _TextWork:
    """Encodes captions."""

    def __init__(self, encode: EncodeText, dtype: torch.dtype, batch: int) -> None:
        self._encode, self._dtype, self._batch = encode, dtype, batch

    def do(self, portions: Iterator[pl.DataFrame], group: Group) -> Iterator[tuple[int, bool]]:
        for portion in portions:
            captions = portion["caption"].to_list()
            for start in range(0, len(captions), self._batch):
                part = captions[start : start + self._batch]
                add_captions(group, part, self._encode, self._dtype)
                yield len(part), start + len(part) == len(captions)


class _Portion(NamedTuple):
    """A fixed part of the list and what is missing of it; processes with the same work give it the same name."""

    name: str
    missing: pl.DataFrame


class _Filling:
    """One call: finds what is missing, claims portions, commits groups."""

    def __init__(
        self,
        folder: CacheFolder,
        group: Group,
        find: Callable[[pl.DataFrame, pl.DataFrame], pl.DataFrame],
        work: _LatentWork | _TextWork,
        title: str,
        settings: FillSettings,
    ) -> None:
        self._folder, self._group, self._find, self._work = folder, group, find, work
        self._title, self._settings = title, settings
        self._num_encoded = self._num_unreadable = 0
        self._by_others: list[pl.DataFrame] = []

    def run(self, items: pl.DataFrame) -> Filled:
        parts = list(items.iter_slices(self._settings.portion))[self._settings.rank :: self._settings.num_ranks]
        own = pl.concat([items.clear(), *parts])
        placed = self._find_intact(own)
        portions = self._cut(placed, parts)
        num_missing = sum(portion.missing.height for portion in portions)
        with ProgressBar(self._title, own.height, done=own.height - num_missing) as bar:
            self._bar, self._started = bar, time.monotonic()
            for portion in self._pass(portions):
                # One at a time: whoever waits for another process must hold nothing that one may be waiting for.
                self._pass([portion], wait=True)
        num_pruned = self._prune(own) if self._settings.prune else 0
        self._folder.merge_index(placed)
        return Filled(own.height, self._num_encoded, self._num_unreadable, num_pruned)

    def _find_intact(self, own: pl.DataFrame) -> pl.DataFrame:
        """The entries of this rank's samples; damaged groups are dropped."""
        entries = self._folder.read_index()
        placed = self._find(own, entries)
        damaged = self._folder.find_damaged(placed, read=self._settings.verify)
        if not damaged:
            return placed
        self._folder.drop_damaged(entries, damaged)
        return self._find(own, self._folder.read_index())

    def _cut(self, placed: pl.DataFrame, parts: list[pl.DataFrame]) -> list[_Portion]:
        portions, start = [], 0
        for part in parts:
            missing = part.filter(placed["group"].slice(start, part.height).is_null())
            start += part.height
            name = digest_value([self._group.made_by, part.height, part.row(0)])[:32]
            portions += [_Portion(name, missing)] if missing.height else []
        return portions

    def _pass(self, portions: list[_Portion], *, wait: bool = False) -> list[_Portion]:
        """Do the portions that no other process has claimed; returns the rest."""
        left: list[_Portion] = []
        claims: deque[ExitStack] = deque()
        with ExitStack() as everything:

            def claimed() -> Iterator[pl.DataFrame]:
                for portion in portions:
                    claim = everything.enter_context(ExitStack())
                    if not claim.enter_context(self._folder.claim(portion.name, wait=wait)):
                        left.append(portion)
                        continue
                    rest = self._drop_done(portion.missing)
                    if rest.height:
                        claims.append(claim)
                        yield rest
                    else:
                        claim.close()

            for num_samples, is_last in self._work.do(claimed(), self._group):
                self._advance(num_samples)
                if is_last or self._group.num_bytes >= self._settings.shard_bytes:
                    self._folder.add_group(self._group)
                    self._group.clear()
                if is_last:
                    claims.popleft().close()
        return left

    def _drop_done(self, missing: pl.DataFrame) -> pl.DataFrame:
        """What other processes have not committed meanwhile."""
        new = self._folder.read_new()
        self._by_others += [new] if new.height else []
        if not self._by_others:
            return missing
        rest = missing.filter(self._find(missing, pl.concat(self._by_others))["group"].is_null())
        self._bar.advance(missing.height - rest.height)
        return rest

    def _advance(self, num_samples: int) -> None:
        self._num_encoded += num_samples
        self._num_unreadable += sum(entry["stack"] is None for entry in self._group.entries[-num_samples:])
        rate = self._num_encoded / max(time.monotonic() - self._started, 1e-9)
        self._bar.advance(num_samples, f"{rate:.1f}/s" if sys.stderr.isatty() else "")

    def _prune(self, own: pl.DataFrame) -> int:
        placed = self._find(own, self._folder.read_index())
        return self._folder.prune(placed.filter(pl.col("group").is_not_null()))


EncodePixels = Callable[[Tensor], tuple[Tensor, Tensor | None]]
EncodeText = Callable[[list[str]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class LatentEncoder:
    """Pixels to what is stored; `encode` gives mean and standard deviation (None: there is none)."""

    encode: EncodePixels
    dtype: torch.dtype
    store: Store = "moments"
    seed: int = 0

    def run(self, pixels_BCFHW: Tensor, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
        mean, std = self.encode(pixels_BCFHW)
        names = [item["path"] for item in items]
        if self.store == "sample":
            drawn = [self._draw(mean[place], std, place, item) for place, item in enumerate(items)]
            return _unbatch({"sample": torch.stack(drawn)}, self.dtype, names, "latents")
        parts = {"mean": mean} if std is None else {"mean": mean, "std": std}
        return _unbatch(parts, self.dtype, names, "latents")

    def _draw(self, mean_CFHW: Tensor, std: Tensor | None, place: int, item: Mapping[str, Any]) -> Tensor:
        """Noise of a clip's own, whatever its row or its neighbours are."""
        if std is None:
            return mean_CFHW
        identity = int(digest_value([item[name] for name in LATENT_KEY])[:15], 16)
        noise = torch.randn(mean_CFHW.shape, generator=stream(self.seed, "cached latent", identity))
        return mean_CFHW + std[place] * noise.to(mean_CFHW.device, mean_CFHW.dtype)


def _unbatch(parts: Mapping[str, Tensor], dtype: torch.dtype, names: list[str], what: str) -> list[dict[str, Tensor]]:
    """One dictionary per sample, on the host, floating point in `dtype`."""
    stored = {}
    for name, tensor in parts.items():
        if len(tensor) != len(names):
            raise ValueError(f"the encoder gave {len(tensor)} {what} for {len(names)} inputs")
        host = tensor.detach().cpu()
        stored[name] = host.to(dtype) if host.is_floating_point() else host
        if host.is_floating_point() and not stored[name].isfinite().all():
            wrong = [names[i] for i in range(len(names)) if not stored[name][i].isfinite().all()]
            raise CacheError(
                f"the encoder gave {what} that are not finite in {dtype} for {wrong[:8]}; use a wider dtype"
            )
    return [{name: tensor[place].clone() for name, tensor in stored.items()} for place in range(len(names))]


def add_latents(
    group: Group,
    items: Sequence[Mapping[str, Any]],
    states: Sequence[SourceState],
    read: Batch,
    encoder: LatentEncoder,
) -> dict[int, dict[str, Tensor]]:
    """Encode what was read of `items` into `group`; gives what was stored by row. `states` are from before reading."""
    reasons = {clip.row: clip.reason for clip in read.bad}
    good = [item for item in items if item["row"] not in reasons]
    stored: dict[int, dict[str, Tensor]] = {}
    if good:
        assert read.pixels_BCFHW is not None
        parts = encoder.run(read.pixels_BCFHW, good)
        stored = {item["row"]: part for item, part in zip(good, parts, strict=True)}
    for item, state in zip(items, states, strict=True):
        entry = {name: item[name] for name in LATENT_KEY} | describe_source(item, state)
        if item["row"] in stored:
            group.add(entry | {"reason": None}, latent_stack(read.bucket), stored[item["row"]])
        else:
            group.add_empty(entry | {"reason": reasons[item["row"]]})
    return stored


def add_captions(
    group: Group, captions: list[str], encode: EncodeText, dtype: torch.dtype
) -> dict[str, dict[str, Tensor]]:
    """Encode `captions` into `group`; gives what was stored of each."""
    parts = _unbatch(encode(captions), dtype, captions, "embeddings")
    for caption, part in zip(captions, parts, strict=True):
        group.add({"key": caption_key(caption)}, TEXT_STACK, part)
    return dict(zip(captions, parts, strict=True))
