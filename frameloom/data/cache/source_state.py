"""Whether a cached clip's source file has changed: by size and time, and by content where these differ.

A file that was only copied or touched has another time but the same content, so its latents stay valid. A missing
source file does not invalidate its cached latents.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import polars as pl

SOURCE = {"source_bytes": pl.Int64, "source_time_ns": pl.Int64, "source_sha256": pl.String}
# How an item says where its bytes are: `offset` and `num_bytes` are null for a whole file, else a part of a tar.
LOCATION = ("root", "path", "offset", "num_bytes")
_GONE = -1
_CHUNK_BYTES = 1 << 20

FileDigests = dict[tuple[str, int, int, int | None], str]
"""(path, bytes, time, offset) to the SHA-256 found there: a touched file is read once, not at every start"""


class SourceState(NamedTuple):
    """Size and time of a file; both -1 if there is none."""

    num_bytes: int
    time_ns: int


def stat_source(item: Mapping[str, Any]) -> SourceState:
    return SourceState(*_stat(os.path.join(item["root"], item["path"])))


def _stat(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return _GONE, _GONE
    return found.st_size, found.st_mtime_ns


def describe_source(item: Mapping[str, Any], before: SourceState) -> dict[str, Any]:
    """Columns for the index; `before` was taken before the file was read, so a later change is noticed."""
    path = os.path.join(item["root"], item["path"])
    is_there = before.num_bytes != _GONE and os.path.isfile(path)
    digest = _digest(path, item["offset"], item["num_bytes"], before) if is_there else ""
    return {"source_bytes": before.num_bytes, "source_time_ns": before.time_ns, "source_sha256": digest}


# A clip is needed once per bucket; with the state in the key, a changed file is read again.
@lru_cache(maxsize=256)
def _digest(path: str, offset: int | None, num_bytes: int | None, state: SourceState) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(offset or 0)
        left = state.num_bytes if num_bytes is None else num_bytes
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def find_valid(found: pl.DataFrame, known: FileDigests) -> pl.DataFrame:
    """The rows of `found` (with the columns of LOCATION and SOURCE) whose file is as it was, or gone.

    Digests that are not in `known` are computed and added to it.
    """
    files = found.select("root", "path").unique(maintain_order=True)
    paths = files.select(pl.concat_str("root", pl.lit("/"), "path")).to_series().to_list()
    sizes, times = zip(*map(_stat, paths), strict=True) if paths else ((), ())
    now = files.with_columns(pl.Series("now_bytes", sizes, pl.Int64), pl.Series("now_time_ns", times, pl.Int64))
    table = found.join(now, on=["root", "path"], how="left", maintain_order="left")
    same_size = pl.col("now_bytes") == pl.col("source_bytes")
    same_state = same_size & (pl.col("now_time_ns") == pl.col("source_time_ns"))
    is_gone = pl.col("now_bytes") == _GONE
    # Only these are worth reading: a file of another size is another file.
    unsure = (same_size | pl.col("offset").is_not_null()) & ~same_state & ~is_gone
    numbered = table.with_row_index("candidate")
    same = []
    for item in numbered.filter(unsure).iter_rows(named=True):
        state = SourceState(item["now_bytes"], item["now_time_ns"])
        key = (item["path"], *state, item["offset"])
        if key not in known:
            path = os.path.join(item["root"], item["path"])
            known[key] = _digest(path, item["offset"], item["num_bytes"], state)
        if known[key] == item["source_sha256"]:
            same.append(item["candidate"])
    same_content = pl.col("candidate").is_in(same)
    return numbered.filter(same_state | is_gone | same_content).select(found.columns)


def format_source(item: Mapping[str, Any]) -> str:
    """What a changed file was and is; `item` has the columns of LOCATION and SOURCE."""
    was = SourceState(item["source_bytes"], item["source_time_ns"])
    return f"file: wanted {_format_state(stat_source(item))}, cache has {_format_state(was)}"


def _format_state(state: SourceState) -> str:
    if state.num_bytes == _GONE:
        return "none"
    return f"{state.num_bytes} bytes of {datetime.fromtimestamp(state.time_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
