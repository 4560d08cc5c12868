"""A cache on disk: groups of samples that are added whole, by any number of processes, and never changed.

    cache.json                    format and kind
    made-by/<digest>.json         fingerprints: what samples were made from
    shards/<digest>.safetensors   the tensors of a group
    groups/<digest>.parquet       the entries of a group; the group exists once this file does
    index-<digest>.parquet        the entries of many groups in one file, to open faster, and in order: newest last
    files-<digest>.parquet        digests of source files that were touched or copied, so that each is read only once

Every file but the first is named by the digest of its content: processes that do the same work write the same files,
damage shows, and writing a damaged file again heals it. A killed process loses the group it was filling.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self

import polars as pl

from frameloom.core.errors import CacheError
from frameloom.core.files import PARTIAL, atomic_file, digest_file, digest_value, remove_partial, write_json
from frameloom.core.logging import get_logger
from frameloom.core.text_files import read_object
from frameloom.data.cache.shards import REBUILD, Group, ShardReader
from frameloom.data.cache.source_state import FileDigests

_log = get_logger(__name__)

CACHE_FILE = "cache.json"
GROUPS, SHARDS, MADE_BY, CLAIMS = "groups", "shards", "made-by", "claims"
_USE_LOCK, _COMMIT_LOCK = ".use.lock", ".commit.lock"
_FORMAT = 2
_DIGITS = 32
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LOCATION = {"made_by": pl.String, "stack": pl.String, "slot": pl.Int32, "crc": pl.Int64}
_FILES = {"path": pl.String, "bytes": pl.Int64, "time_ns": pl.Int64, "offset": pl.Int64, "sha256": pl.String}
_WHERE = {"number": pl.Int32, "shard": pl.String, "shard_bytes": pl.Int64, "group": pl.String}


class CacheFolder:
    """Make one with `create` (to write) or `open` (to read). `columns` are those that say what a sample is."""

    def __init__(self, path: Path, kind: str, columns: Mapping[str, Any]) -> None:
        self.path = path
        self.kind = kind
        self.shards = ShardReader(path / SHARDS)
        self._columns = dict(columns)
        self._no_entries = pl.DataFrame(schema={**self._columns, **_LOCATION, **_WHERE})
        self._seen: set[str] = set()
        # Held as long as this object lives, so that pruning knows of readers and writers. None where the folder cannot
        # be written: nobody prunes it then.
        self._use: int | None = None
        try:
            self._use = os.open(path / _USE_LOCK, os.O_CREAT | os.O_RDWR, 0o666)
            weakref.finalize(self, os.close, self._use)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
        _lock(self._use, fcntl.LOCK_SH)

    @classmethod
    def open(cls, path: Path, kind: str, columns: Mapping[str, Any]) -> Self:
        """CacheError if there is no cache of this kind and format."""
        _check_kind(path, kind)
        return cls(path, kind, columns)

    @classmethod
    def create(cls, path: Path, kind: str, columns: Mapping[str, Any]) -> Self:
        """Begin or resume a cache; a folder of other things is refused."""
        path.mkdir(parents=True, exist_ok=True)
        # Listed before the look for cache.json, which another process may be writing: it comes before all else.
        is_used = any(not entry.name.startswith(".") for entry in path.iterdir())
        if is_used and not (path / CACHE_FILE).exists():
            raise CacheError(f"{path}: not empty and not a cache; choose another folder")
        folder = cls(path, kind, columns)
        if not (path / CACHE_FILE).exists():
            write_json(path / CACHE_FILE, {"format": _FORMAT, "kind": kind})
        _check_kind(path, kind)
        for name in (GROUPS, SHARDS, MADE_BY, CLAIMS):
            (path / name).mkdir(exist_ok=True)
        if _lock(folder._use, fcntl.LOCK_EX | fcntl.LOCK_NB):
            folder._clear_leftovers()
        _lock(folder._use, fcntl.LOCK_SH)
        return folder

    def read_index(self) -> pl.DataFrame:
        """The entries of all groups, the newest last; a damaged group is left out with a warning."""
        merged = self._read_single("index")
        merged = self._no_entries if merged is None else merged
        names = self._group_names()
        self._seen = set(merged["group"].unique().to_list()) & names
        return pl.concat([merged.filter(pl.col("group").is_in(list(names))), self.read_new()])

    def read_new(self) -> pl.DataFrame:
        """The entries of groups that came since this object read or added any, in the order of writing."""
        new = []
        for name in self._group_names() - self._seen:
            with suppress(FileNotFoundError):
                new.append(((self.path / GROUPS / name).stat().st_mtime_ns, name))
        tables = [self._no_entries]
        for _, name in sorted(new):
            self._seen.add(name)
            path = self.path / GROUPS / name
            table = _read_digested(path, path.stem)
            if table is None:
                _log.warning("%s: damaged or gone; its samples count as missing", path)
            else:
                tables.append(table.with_columns(pl.lit(name).alias("group")))
        return pl.concat(tables)

    def read_file_digests(self) -> FileDigests:
        """What is known of source files that were touched or copied."""
        table = self._read_single("files")
        return {} if table is None else {row[:4]: row[4] for row in table.iter_rows()}

    def note_file_digests(self, known: FileDigests) -> None:
        """Keep digests for the next opening, where the folder can be written."""
        if self._use is None:
            return
        with self._committing():
            rows = [(*key, digest) for key, digest in sorted((self.read_file_digests() | known).items(), key=str)]
            self._replace_single("files", pl.DataFrame(rows, schema=_FILES, orient="row"))

    def read_fingerprints(self) -> dict[str, dict[str, Any]]:
        return {path.stem: _read_json(path) for path in sorted((self.path / MADE_BY).glob("[!.]*.json"))}

    def note_fingerprint(self, fingerprint: Mapping[str, Any]) -> str:
        """Keep what samples are made from; gives the name that entries refer to it by."""
        name = name_fingerprint(fingerprint)
        path = self.path / MADE_BY / f"{name}.json"
        if not path.exists():
            write_json(path, json.loads(json.dumps(dict(fingerprint), default=str)))
        return name

    def add_group(self, group: Group) -> pl.DataFrame:
        """Commit the samples, all or none; gives their entries."""
        data = group.pack()
        shard = f"{_digest(data)}.safetensors" if group.num_bytes else None
        table = pl.DataFrame(
            group.entries, schema={**self._columns, **_LOCATION}, infer_schema_length=None
        ).with_columns(
            pl.int_range(pl.len(), dtype=pl.Int32).alias("number"),
            pl.when(pl.col("stack").is_not_null()).then(pl.lit(shard, pl.String)).alias("shard"),
            pl.lit(len(data), pl.Int64).alias("shard_bytes"),
        )
        record = _to_parquet(table)
        name = f"{_digest(record)}.parquet"
        with self._committing():
            if shard is not None:
                _write_bytes(self.path / SHARDS / shard, data)
            _write_bytes(self.path / GROUPS / name, record)
        self._seen.add(name)
        return table.with_columns(pl.lit(name).alias("group"))

    def find_damaged(self, entries: pl.DataFrame, *, read: bool) -> list[str]:
        """Shards of `entries` that are missing or of another size, and with `read` those of other content."""
        used = entries.filter(pl.col("shard").is_not_null()).unique("shard", maintain_order=True)
        return [
            shard
            for shard, size in used.select("shard", "shard_bytes").rows()
            if not self._is_intact(shard, size, read=read)
        ]

    def drop_damaged(self, entries: pl.DataFrame, shards: list[str]) -> None:
        """Remove damaged groups, unless another process has healed them in the meantime."""
        for shard in shards:
            part = entries.filter(pl.col("shard") == shard)
            with self._committing():
                if self._is_intact(shard, int(part["shard_bytes"][0]), read=True):
                    continue
                _log.warning("%s: damaged; its %d samples are encoded again", self.path / SHARDS / shard, part.height)
                self._remove(part["group"].unique().to_list(), [shard])

    def merge_index(self, current: pl.DataFrame | None = None) -> None:
        """Write the entries of all groups into one file, so that the next opening reads one instead of many.

        Those of `current` were just found to be right, so they count as the newest: a file may go back to what it was.
        """
        with self._committing():
            index = self.read_index()
            if current is not None:
                entry = ["group", "number"]
                older, newer = (index.join(current, entry, how, maintain_order="left") for how in ("anti", "semi"))
                index = pl.concat([older, newer])
            self._replace_single("index", index)

    def _read_single(self, kind: str) -> pl.DataFrame | None:
        """The only file of its kind, if it exists and is whole."""
        found = (
            _read_digested(path, path.stem.removeprefix(f"{kind}-")) for path in self.path.glob(f"{kind}-*.parquet")
        )
        return next((table for table in found if table is not None), None)

    def _replace_single(self, kind: str, table: pl.DataFrame) -> None:
        """Write the only file of its kind, then remove the ones before it."""
        data = _to_parquet(table)
        new = self.path / f"{kind}-{_digest(data)}.parquet"
        old = [path for path in self.path.glob(f"{kind}-*.parquet") if path != new]
        _write_bytes(new, data)
        for path in old:
            path.unlink(missing_ok=True)

    @contextmanager
    def claim(self, name: str, *, wait: bool) -> Iterator[bool]:
        """Whether this process may do the work `name`; no other one may until the block ends or this process dies."""
        path = self.path / CLAIMS / name
        with path.open("a") as file:
            is_ours = _lock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            try:
                yield is_ours
            finally:
                if is_ours:
                    path.unlink(missing_ok=True)

    def prune(self, needed: pl.DataFrame) -> int:
        """Drop all entries but `needed` (rows of the index); gives how many. CacheError while others use the cache."""
        if not _lock(self._use, fcntl.LOCK_EX | fcntl.LOCK_NB):
            _lock(self._use, fcntl.LOCK_SH)
            raise CacheError(
                f"{self.path}: in use by another process, so nothing is dropped; wait for it and try again"
            )
        index = self.read_index()
        kept = index.join(needed.select("group", "number"), on=["group", "number"], how="semi")
        sizes = dict(index.group_by("group").len().rows())
        for part in kept.partition_by("group", maintain_order=True):
            if part.height < sizes[part["group"][0]]:
                self._repack(part)
        whole = {part["group"][0] for part in kept.partition_by("group") if part.height == sizes[part["group"][0]]}
        self._remove([name for name in sizes if name not in whole], [])
        self._clear_leftovers()
        self.merge_index()
        _lock(self._use, fcntl.LOCK_SH)
        return index.height - kept.height

    def _repack(self, part: pl.DataFrame) -> None:
        """Commit the samples of `part` again as new groups."""
        for same in part.partition_by("made_by"):
            group = Group(same["made_by"][0], ragged=self.kind == "text")
            for entry in same.iter_rows(named=True):
                facts = {name: entry[name] for name in self._columns}
                if entry["stack"] is None:
                    group.add_empty(facts)
                    continue
                sample = self.shards.sample(entry["shard"], entry["stack"], entry["slot"], entry["crc"])
                group.add_stored(facts, entry["stack"], sample)
            self.add_group(group)

    def _remove(self, groups: list[str], shards: list[str]) -> None:
        # The record goes first: a group without it does not exist, whatever is left of its shard.
        for name in groups:
            (self.path / GROUPS / name).unlink(missing_ok=True)
            self._seen.discard(name)
        for name in shards:
            (self.path / SHARDS / name).unlink(missing_ok=True)

    def _clear_leftovers(self) -> None:
        """Remove what killed writers left; only while no other process uses the folder."""
        for name in ("", GROUPS, SHARDS, MADE_BY):
            remove_partial(self.path / name)
        index = self.read_index()
        shards, made_by = set(index["shard"].to_list()), set(index["made_by"].to_list())
        for path in (self.path / SHARDS).glob("*.safetensors"):
            if path.name not in shards:
                path.unlink()
        for path in (self.path / MADE_BY).glob("*.json"):
            if path.stem not in made_by:
                path.unlink()
        for path in (self.path / CLAIMS).iterdir():
            path.unlink()

    def _group_names(self) -> set[str]:
        return {path.name for path in (self.path / GROUPS).glob("*.parquet") if not path.name.startswith(PARTIAL)}

    def _is_intact(self, shard: str, size: int, *, read: bool) -> bool:
        path = self.path / SHARDS / shard
        try:
            if path.stat().st_size != size:
                return False
            return not read or digest_file(path)[:_DIGITS] == path.stem
        except FileNotFoundError:
            return False

    @contextmanager
    def _committing(self) -> Iterator[None]:
        with (self.path / _COMMIT_LOCK).open("a") as file:
            _lock(file, fcntl.LOCK_EX)
            yield


def name_fingerprint(fingerprint: Mapping[str, Any]) -> str:
    return digest_value(json.loads(json.dumps(dict(fingerprint), default=str)))[:16]


def _check_kind(path: Path, kind: str) -> None:
    if not (path / CACHE_FILE).exists():
        raise CacheError(f"{path}: no cache here; make it with: frameloom data cache RECIPE")
    facts = _read_json(path / CACHE_FILE)
    if facts.get("format") != _FORMAT:
        found = facts.get("format")
        raise CacheError(f"{path}: cache format {found}, this version reads {_FORMAT}; remove the folder and {REBUILD}")
    if facts.get("kind") != kind:
        raise CacheError(f"{path}: a cache of {facts.get('kind')}, wanted one of {kind}; name another folder")


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, error=CacheError, fix=f"remove the folder and {REBUILD}")


def _read_digested(path: Path, digest: str) -> pl.DataFrame | None:
    """The table of a file, or None if it is not what its name says or was removed meanwhile."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return pl.read_parquet(io.BytesIO(data)) if _digest(data) == digest else None


def _write_bytes(path: Path, data: bytes) -> None:
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


def _to_parquet(table: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.write_parquet(buffer)
    return buffer.getvalue()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def _lock(file: IO[str] | int | None, how: int) -> bool:
    """Whether the lock was got. Where a file system has none, waiting succeeds: work done twice is harmless."""
    if file is None:
        return not how & fcntl.LOCK_EX
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return not (how & fcntl.LOCK_EX and how & fcntl.LOCK_NB)
    return True
