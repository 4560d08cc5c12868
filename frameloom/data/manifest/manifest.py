"""The manifest: one row per clip or image of one or several sources, validated before any file is opened.

Columns are `path` (relative to the source's root), `caption`, `kind` ("video" or "image"), `height`, `width`,
`frames`, `fps` (null for images) and any others. Rows stay in columns, so ten million of them cost no Python objects;
a path, a caption and the facts of one clip are fetched when its row is read.

Weights and repeats of sources are applied here. Each source has one keyed order of its rows, endlessly repeated; an
epoch takes the next stretch of it. So a repeat of 2 shows every row twice, a repeat of 0.5 shows one half and then the
other, and over any number of epochs the counts of two rows of a source differ by one at most.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import polars as pl
from numpy.typing import NDArray

from frameloom.config.schema.data import SourceSection
from frameloom.core.errors import DataError
from frameloom.core.files import atomic_file
from frameloom.core.paths import safe_join
from frameloom.core.random import bits_at, key
from frameloom.core.spelling import suggest
from frameloom.data.manifest.filters import Where, filter_table
from frameloom.data.manifest.rows import Rows, TableRows, check_table, refuse_incomplete
from frameloom.data.manifest.shard_table import open_shards, write_shards
from frameloom.data.manifest.sources.columns import REQUIRED
from frameloom.data.manifest.sources.parquet_tables import find_shards
from frameloom.data.manifest.sources.reading import Source, read_source
from frameloom.data.media.tar_members import Member

# Columns beyond the required ones that decide what is trained on.
TRAINED_ON = ("sha256", "start_frame", "end_frame", "captions", "member", "offset", "control")
_HASH_ROWS = 1_000_000


class ClipRow(NamedTuple):
    """What the manifest says about one clip; `fps` is None for an image."""

    row: int
    path: str
    caption: str
    kind: str
    height: int
    width: int
    frames: int
    fps: float | None


class Share(NamedTuple):
    """`repeat` is how often each row comes in an epoch; a `weight` is the source's part of an epoch instead.

    A source with a repeat of 0 (and a weight of 0 where others have weights) is in no epoch by itself.
    """

    num_rows: int
    weight: float | None = None
    repeat: float = 1.0

    @property
    def is_plain(self) -> bool:
        return self.weight is None and self.repeat == 1


@dataclass(frozen=True)
class Part:
    """The rows of one source."""

    rows: Rows
    root: Path
    source: str
    weight: float | None = None
    repeat: float = 1.0

    @property
    def share(self) -> Share:
        """Always floats: the fingerprint must be the same for 2 and 2.0."""
        return Share(len(self.rows), None if self.weight is None else float(self.weight), float(self.repeat))


class Manifest:
    """Checked rows of one or several sources. Make one with `read` or `read_sources`."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._starts = np.cumsum([0, *(len(part.rows) for part in self.parts)]).tolist()

    @classmethod
    def read(cls, path: Path, *, root: Path | None = None, where: Where | None = None) -> Self:
        """Read and check any source; `where` keeps the rows that fulfil a filter (see `filters`)."""
        section = SourceSection(path=str(path), root=None if root is None else str(root))
        return cls.read_sources([section], where=where)

    @classmethod
    def read_sources(cls, sections: Sequence[SourceSection], *, where: Where | None = None) -> Self:
        """The rows of several sources, one after another; `where` is for all of them, beside each one's own."""
        return cls([_read_part(section, [found for found in (section.where, where) if found]) for section in sections])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def root(self) -> Path:
        """The folder that the paths start from; each of several sources has its own in `parts`."""
        return self.parts[0].root

    @property
    def source(self) -> str:
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{self.parts[0].source}{more}"

    @cached_property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for part in self.parts for name in part.rows.columns))

    def column(self, name: str) -> pl.Series:
        """Any column, also one beyond the required ones; null in the rows of a source that lacks it."""
        if name not in self.columns:
            raise DataError(f"{self.source}: no column '{name}'; {suggest(name, self.columns, kind='columns')}")
        return self._slice(name, 0, len(self))

    @cached_property
    def height(self) -> NDArray[np.int32]:
        return self._slice("height", 0, len(self)).to_numpy()

    @cached_property
    def width(self) -> NDArray[np.int32]:
        return self._slice("width", 0, len(self)).to_numpy()

    @cached_property
    def frames(self) -> NDArray[np.int32]:
        return self._slice("frames", 0, len(self)).to_numpy()

    @cached_property
    def fps(self) -> NDArray[np.float64]:
        """Frames per second; NaN for images."""
        return self._slice("fps", 0, len(self)).fill_null(float("nan")).to_numpy()

    def clip(self, row: int) -> ClipRow:
        """The facts of one row."""
        return ClipRow(row, *self._read(row, *REQUIRED)[1])

    def caption(self, row: int) -> str:
        return str(self._read(row, "caption")[1][0])

    def captions(self, rows: Sequence[int] | NDArray[np.int64]) -> list[str]:
        if len(self.parts) > 1:
            return [self.caption(int(row)) for row in rows]
        # One call for a whole batch: every training step needs it.
        found = self.parts[0].rows.gather("caption", [int(row) for row in rows])
        return [str(caption) for caption in found]

    def all_captions(self, row: int) -> list[str]:
        """Those that a row has to choose from; a row without a list, or with an empty one, has its one caption."""
        _, (several,) = self._read(row, "captions")
        texts = [str(text) for text in several if text is not None] if several is not None else []
        return texts or [self.caption(row)]

    def file(self, row: int) -> Path:
        """Where the file of a row is (a tar for a member of one); refused when a link leads out of the root."""
        part, (path,) = self._read(row, "path")
        return safe_join(part.root, str(path), where=f"{part.source}: row {self._locate(row)[1]}")

    def control_file(self, row: int) -> Path | None:
        """The control clip of a row; None for a row without one."""
        part, (path,) = self._read(row, "control")
        where = f"{part.source}: row {self._locate(row)[1]}"
        return None if path is None else safe_join(part.root, str(path), where=where)

    def member(self, row: int) -> Member | None:
        """Position of the clip inside its tar, for `MemberFile`; None for a plain file."""
        _, (name, offset, num_bytes) = self._read(row, "member", "offset", "bytes")
        if None in (name, offset, num_bytes):
            return None
        return Member(self.file(row), str(name), int(offset), int(num_bytes))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides what is trained on: files, captions, shapes, content hashes, order, shares."""
        plain = all(part.share.is_plain for part in self.parts)
        known = self.parts[0].rows.known_fingerprint
        if len(self.parts) == 1 and plain and known:
            return known
        digest = hashlib.sha256(f"frameloom manifest 1, {len(self)} rows".encode())
        for name in (*REQUIRED, *(name for name in TRAINED_ON if name in self.columns)):
            digest.update(f"/{name}/".encode())
            for start in range(0, len(self), _HASH_ROWS):
                _hash_column(digest, self._slice(name, start, _HASH_ROWS))
        if not plain:
            digest.update(json.dumps([part.share for part in self.parts]).encode())
        return digest.hexdigest()

    def _locate(self, row: int) -> tuple[Part, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        index = bisect_right(self._starts, row) - 1
        return self.parts[index], row - self._starts[index]

    def _read(self, row: int, *names: str) -> tuple[Part, tuple[Any, ...]]:
        """(source of a row, its values); None for a column that the source lacks."""
        part, local = self._locate(row)
        columns = part.rows.columns
        known = [name for name in names if name in columns]
        if len(known) == len(names):
            return part, part.rows.values(names, local)
        found = dict(zip(known, part.rows.values(known, local), strict=True)) if known else {}
        return part, tuple(found.get(name) for name in names)

    def _slice(self, name: str, start: int, count: int) -> pl.Series:
        found = []
        for part, first in zip(self.parts, self._starts, strict=False):
            low, high = max(start - first, 0), min(start + count - first, len(part.rows))
            if high <= low:
                continue
            if name in part.rows.columns:
                found.append(part.rows.slice(name, low, high - low).to_frame(name))
            else:
                found.append(pl.DataFrame({name: pl.Series([None] * (high - low))}))
        if len(found) == 1:
            return found[0].to_series()
        return pl.concat(found, how="vertical_relaxed", rechunk=True).to_series()

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Manifest.__init__(self, state["parts"])


def samples_per_source(shares: Sequence[Share]) -> list[int]:
    """Samples of each source in an epoch. Weights divide as many samples as there are rows (repeats counted)."""
    counts = [
        max(1, round(share.num_rows * share.repeat)) if share.num_rows and share.repeat else 0 for share in shares
    ]
    if all(share.weight is None for share in shares):
        return counts
    if any(share.weight is None for share in shares):
        raise ValueError("either all sources have a weight or none")
    total, weights = sum(counts), np.array([share.weight for share in shares], dtype=np.float64)
    exact = weights / weights.sum() * total
    whole = np.floor(exact).astype(np.int64)
    # The largest fractions get what rounding down left over, so that the sum stays.
    for index in np.argsort(whole - exact, kind="stable")[: total - int(whole.sum())]:
        whole[index] += 1
    return [int(count) for count in whole]


def rows_in_epoch(shares: Sequence[Share], seed: int, epoch: int) -> NDArray[np.int64]:
    """The rows of an epoch in rising order, each as often as its source's weight or repeat shows it."""
    total = sum(share.num_rows for share in shares)
    if all(share.is_plain for share in shares):
        return np.arange(total, dtype=np.int64)
    times = np.zeros(total, dtype=np.int64)
    start = 0
    for index, (share, samples) in enumerate(zip(shares, samples_per_source(shares), strict=True)):
        num_rows, own = share.num_rows, times[start : start + share.num_rows]
        start += num_rows
        if not num_rows:
            continue
        # Whole rounds, and once more for those in the stretch that is left.
        rounds, rest = divmod(samples, num_rows)
        own += rounds
        if rest:
            order = np.argsort(bits_at(key(seed, "share", index), np.arange(num_rows)), kind="stable")
            own[order[np.arange(epoch * samples % num_rows, epoch * samples % num_rows + rest) % num_rows]] += 1
    return np.repeat(np.arange(total, dtype=np.int64), times)


def write_manifest(path: Path, table: pl.DataFrame) -> None:
    """Check `table` and write it as a manifest, complete or not at all."""
    checked = check_table(table, source=str(path))
    with atomic_file(path) as temporary:
        checked.write_parquet(temporary)


def shard_manifest(path: Path, out: Path, *, rows: int, root: Path | None = None, where: Where = "") -> Iterator[str]:
    """Cut any complete source into shards with the same fingerprint; says what was written and where its root is."""
    source = read_source(path, root=root)
    table = read_table(source, str(path), [where] if where else [])
    whole = Manifest([Part(TableRows(table), source.root, str(path))])
    count = write_shards(table, out, rows=rows, fingerprint=whole.fingerprint)
    yield f"{out}: {table.height:,} rows in {count:,} shards"
    if source.root.resolve() != out.resolve().parent:
        yield f"paths start from {source.root}, not from the folder of {out}: set data.root to it"


def read_table(source: Source, name: str, filters: Sequence[Where] = ()) -> pl.DataFrame:
    """The filtered rows of a source, complete and checked; DataError names what is missing or wrong."""
    table = source.table
    locate = source.locate
    if filters:
        table = table.with_row_index("__row")
        for where in filters:
            table = filter_table(table, where, source=name)
        kept = table["__row"]
        table = table.drop("__row").rechunk()

        def locate(row: int) -> str:
            return source.locate(int(kept[row]))

    refuse_incomplete(table, source=name, locate=locate)
    return check_table(table, source=name, locate=locate)


def _read_part(section: SourceSection, filters: Sequence[Where]) -> Part:
    path, root = Path(section.path), None if section.root is None else Path(section.root)
    shards = find_shards(path) if path.is_dir() or path.suffix == ".parquet" else None
    if shards is not None:
        root = root or shards.root
        rows: Rows = open_shards(shards, root=root, filters=filters, source=str(path))
    else:
        source = read_source(path, root=root)
        root, rows = source.root, TableRows(read_table(source, str(path), filters))
    return Part(rows, root, str(path), section.weight, section.repeat)


def _hash_column(digest: Any, column: pl.Series) -> None:
    """Feed values, not their encoding in the file: chunks and compression must not change the fingerprint."""
    if isinstance(column.dtype, pl.List):
        column = column.cast(pl.List(pl.String)).list.join("\0")
    if column.dtype == pl.String or column.dtype == pl.Null:
        text = column.cast(pl.String).fill_null("")
        digest.update(text.str.len_bytes().cast(pl.Int64).to_numpy().tobytes())
        digest.update(text.str.join("").item().encode())
    elif column.dtype.is_integer():
        digest.update(column.cast(pl.Int64).fill_null(-1).to_numpy().tobytes())
    else:
        digest.update(column.cast(pl.Float64).fill_null(float("nan")).to_numpy().tobytes())
