"""Tensors of many samples in safetensors shards: written so that a killed writer loses at most one shard, read fast.

A finished folder holds `cache.json` (what the tensors are, a digest of every file), `index.parquet` (where each sample
is) and the shards. While it is being written it holds `building.json` and, beside each finished shard, a `.done.json`;
`cache.json` comes last, so a folder without it is not a cache.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from frameloom.core.errors import CacheError
from frameloom.core.files import atomic_file, digest_file, remove_partial, write_json

CACHE_FILE = "cache.json"
INDEX_FILE = "index.parquet"
BUILDING_FILE = "building.json"
SHARD_BYTES = 128 * 2**20
REBUILD = "make it with: frameloom data cache RECIPE"
_FORMAT = 1
_MAX_OPEN_SHARDS = 64
_NUM_SHOWN = 12

Entry = dict[str, Any]


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value as it comes back from a JSON file, so that both sides of a comparison look alike."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(value), default=str))
    return plain


def spell_differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """One line per leaf that differs between two nested dictionaries."""
    ours, theirs = _flatten(wanted), _flatten(found)
    keys = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    keys.sort(key=lambda name: ("[" in name, name))  # long lists must not push the rest out of sight
    lines = [f"  {name}: wanted {ours.get(name, 'nothing')}, cache has {theirs.get(name, 'nothing')}" for name in keys]
    return lines[:_NUM_SHOWN] + ([f"  and {len(lines) - _NUM_SHOWN} more"] if len(lines) > _NUM_SHOWN else [])


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        items = [(f"{prefix}.{name}" if prefix else str(name), inner) for name, inner in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{prefix}[{i}]", inner) for i, inner in enumerate(value)]
    else:
        return {prefix: json.dumps(value, default=str)}
    return {name: leaf for key, inner in items for name, leaf in _flatten(inner, key).items()}


class ShardWriter:
    """Takes numbered units of work in order; `next_unit` says where to go on after an interruption.

    `work` is a digest of the list of units: a folder that was begun for another list is refused.
    """

    def __init__(
        self, folder: Path, *, fingerprint: Mapping[str, Any], work: str, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder = folder
        self.fingerprint = _as_json(fingerprint)
        self.next_unit = 0
        self.is_complete = False
        self._work = work
        self._shard_bytes = shard_bytes
        self._shards: list[dict[str, Any]] = []
        self._entries: list[Entry] = []
        self._begin_shard(0)
        folder.mkdir(parents=True, exist_ok=True)
        if not self._find_complete():
            remove_partial(folder)
            self._find_begun()

    def _begin_shard(self, first_unit: int) -> None:
        self._first_unit = first_unit
        self._tensors: dict[str, list[Tensor]] = {}
        self._open_entries: list[Entry] = []
        self._num_bytes = 0

    def _find_complete(self) -> bool:
        if not (self.folder / CACHE_FILE).exists():
            return False
        facts = _read_json(self.folder / CACHE_FILE)
        self._refuse_other(facts, "a finished cache of other things")
        self.is_complete = True
        return True

    def _find_begun(self) -> None:
        building = self.folder / BUILDING_FILE
        if not building.exists():
            if any(self.folder.iterdir()):
                raise CacheError(f"{self.folder}: not empty and not a cache; choose another folder")
            write_json(building, {"fingerprint": self.fingerprint, "work": self._work})
            return
        self._refuse_other(_read_json(building), "an unfinished cache of other things")
        while (done := self.folder / f"{_shard_name(len(self._shards))}.done.json").exists():
            record = _read_json(done)
            shard = self.folder / record["name"]
            if not shard.exists() or digest_file(shard) != record["sha256"]:
                break
            self.next_unit = record.pop("next_unit")
            self._entries += record.pop("entries")
            self._shards.append(record)
        self._begin_shard(self.next_unit)

    def _refuse_other(self, facts: Mapping[str, Any], what: str) -> None:
        ours = {"fingerprint": self.fingerprint, "work": self._work}
        theirs = {name: facts.get(name) for name in ours}
        if ours != theirs:
            lines = "\n".join(spell_differences(ours, theirs))
            raise CacheError(f"{self.folder}: holds {what}; remove the folder or choose another one\n{lines}")

    def add(self, unit: int, tensors: Mapping[str, Tensor], entries: Sequence[Entry]) -> None:
        """Store one unit: tensors are joined along dim 0 by name; an entry with `tensor` gets its shard and slot."""
        if unit != self.next_unit:
            raise ValueError(f"unit {unit} came when {self.next_unit} was due")
        offsets = {name: sum(len(part) for part in self._tensors.get(name, [])) for name in tensors}
        for name, tensor in tensors.items():
            self._tensors.setdefault(name, []).append(tensor)
            self._num_bytes += tensor.numel() * tensor.element_size()
        for entry in entries:
            name, place = entry.pop("tensor", None), entry.pop("place", 0)
            here = {"shard": len(self._shards), "slot": offsets[name] + place} if name else {"shard": -1, "slot": -1}
            self._open_entries.append(entry | here)
        self.next_unit = unit + 1
        if self._num_bytes >= self._shard_bytes:
            self._flush()

    def _flush(self) -> None:
        if self.next_unit == self._first_unit:
            return
        name = _shard_name(len(self._shards))
        with atomic_file(self.folder / name) as temporary:
            save_file({key: torch.cat(parts).contiguous() for key, parts in self._tensors.items()}, temporary)
        path = self.folder / name
        record = {"name": name, "bytes": path.stat().st_size, "sha256": digest_file(path)}
        done = record | {"next_unit": self.next_unit, "entries": self._open_entries}
        write_json(self.folder / f"{name}.done.json", done)
        self._shards.append(record)
        self._entries += self._open_entries
        self._begin_shard(self.next_unit)

    def finish(self, schema: Mapping[str, Any]) -> None:
        """Write the index (its columns are `schema` plus shard and slot) and then `cache.json`."""
        self._flush()
        index = self.folder / INDEX_FILE
        with atomic_file(index) as temporary:
            pl.DataFrame(self._entries, schema={**schema, "shard": pl.Int32, "slot": pl.Int32}).write_parquet(temporary)
        facts = {
            "format": _FORMAT,
            "fingerprint": self.fingerprint,
            "work": self._work,
            "shards": self._shards,
            "index_sha256": digest_file(index),
            "num_entries": len(self._entries),
        }
        write_json(self.folder / CACHE_FILE, facts)
        for leftover in [self.folder / BUILDING_FILE, *self.folder.glob("*.done.json")]:
            leftover.unlink(missing_ok=True)
        self.is_complete = True


class ShardReader:
    """A finished cache. Small ones are held in memory, one tensor per name; large ones are read from mapped files."""

    def __init__(self, folder: Path, *, expected: Mapping[str, Any], memory_bytes: int) -> None:
        self.folder = folder
        facts = _open_facts(folder)
        wanted = _as_json(expected)
        if facts["fingerprint"] != wanted:
            lines = "\n".join(spell_differences(wanted, facts["fingerprint"]))
            raise CacheError(f"{folder}: made for something else; remove the folder and {REBUILD}\n{lines}")
        self._shards: list[dict[str, Any]] = facts["shards"]
        self._check_files(facts)
        self.index = pl.read_parquet(folder / INDEX_FILE)
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._memory: dict[str, Tensor] | None = None
        self._first_slot: dict[tuple[str, int], int] = {}
        if sum(shard["bytes"] for shard in self._shards) <= memory_bytes:
            self._memory = self._load_all()

    def _check_files(self, facts: Mapping[str, Any]) -> None:
        for shard in self._shards:
            path = self.folder / shard["name"]
            found = path.stat().st_size if path.exists() else None
            if found != shard["bytes"]:
                what = "is missing" if found is None else f"has {found} bytes instead of {shard['bytes']}"
                raise CacheError(f"{path}: {what}; remove the folder and {REBUILD}")
        index = self.folder / INDEX_FILE
        if not index.exists() or digest_file(index) != facts["index_sha256"]:
            raise CacheError(f"{index}: missing or damaged; remove the folder and {REBUILD}")

    def verify(self) -> None:
        """Read every shard and compare its digest; CacheError names the first damaged one."""
        for shard in self._shards:
            if digest_file(self.folder / shard["name"]) != shard["sha256"]:
                raise CacheError(f"{self.folder / shard['name']}: damaged; remove the folder and {REBUILD}")

    def _load_all(self) -> dict[str, Tensor]:
        self.verify()
        parts: dict[str, list[Tensor]] = {}
        for number, shard in enumerate(self._shards):
            for name, tensor in load_file(self.folder / shard["name"]).items():
                before = parts.setdefault(name, [])
                self._first_slot[name, number] = sum(len(part) for part in before)
                before.append(tensor)
        return {name: torch.cat(tensors) for name, tensors in parts.items()}

    def get(self, name: str, shards: NDArray[np.int64], slots: NDArray[np.int64]) -> Tensor | None:
        """The samples at (shard, slot), stacked; None if the cache has no tensor of that name."""
        if self._memory is not None:
            if name not in self._memory:
                return None
            places = [self._first_slot[name, int(shard)] + int(slot) for shard, slot in zip(shards, slots, strict=True)]
            return self._memory[name].index_select(0, torch.tensor(places, dtype=torch.int64))
        samples = []
        for shard, slot in zip(shards.tolist(), slots.tolist(), strict=True):
            file = self._open_shard(shard)
            if name not in file.keys():  # noqa: SIM118  the handle is no dictionary
                return None
            samples.append(file.get_slice(name)[slot : slot + 1])
        return torch.cat(samples)

    def _open_shard(self, number: int) -> Any:
        file = self._open.pop(number, None)
        if file is None:
            path = self.folder / self._shards[number]["name"]
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CacheError(f"{path}: damaged ({error}); remove the folder and {REBUILD}") from error
        self._open[number] = file
        if len(self._open) > _MAX_OPEN_SHARDS:
            self._open.popitem(last=False)
        return file

    @property
    def names(self) -> list[str]:
        """Names of the tensors, from the first shard that has any."""
        if self._memory is not None:
            return sorted(self._memory)
        return sorted(self._open_shard(0).keys()) if self._shards else []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CacheError(f"{path}: damaged ({error}); remove the folder and {REBUILD}") from error
    if not isinstance(value, dict):
        raise CacheError(f"{path}: damaged (no JSON object); remove the folder and {REBUILD}")
    return value


def _open_facts(folder: Path) -> dict[str, Any]:
    if not (folder / CACHE_FILE).exists():
        if (folder / BUILDING_FILE).exists():
            num_done = len(list(folder.glob("*.done.json")))
            raise CacheError(
                f"{folder}: unfinished, {num_done} shards are done; go on with: frameloom data cache RECIPE"
            )
        raise CacheError(f"{folder}: no cache here; {REBUILD}")
    facts = _read_json(folder / CACHE_FILE)
    if facts.get("format") != _FORMAT:
        raise CacheError(f"{folder}: cache format {facts.get('format')}, this version reads {_FORMAT}; {REBUILD}")
    return facts
