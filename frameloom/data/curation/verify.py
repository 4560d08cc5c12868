"""Verification of files against the digests of their manifest: finds changed bits that most decoders do not notice."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl

from frameloom.core.errors import DataError
from frameloom.core.progress import ProgressBar
from frameloom.data.curation.scan import fold_members, list_files, member_of
from frameloom.data.media.tar_members import find_media, open_bytes

DIGEST = "sha256"
_NUM_SHOWN = 10


def digest_files(table: pl.DataFrame, root: Path, *, workers: int = 4) -> dict[str, str | None]:
    """SHA-256 of each different file of a table by its path; None for one that cannot be read."""

    def digest(job: tuple[str, tuple[str, int, int] | None]) -> str | None:
        path, member = job
        try:
            with open_bytes(find_media(root, path, member)) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, DataError):
            return None

    files = list_files(fold_members(table)).iter_rows(named=True)
    jobs = [(row["path"], member_of(row)) for row in files]
    found: dict[str, str | None] = {}
    # Digests are computed outside of Python's lock, so threads are enough.
    with ThreadPoolExecutor(workers) as pool, ProgressBar("verify", len(jobs)) as bar:
        for (path, _), result in zip(jobs, pool.map(digest, jobs), strict=True):
            found[path] = result
            bar.advance()
    return found


def verify_files(table: pl.DataFrame, root: Path, *, name: str, workers: int = 4) -> int:
    """Compare every file with the digest in its row; gives how many are right, if all are.

    DataError with the first of the files that are not what they were, or when the manifest has no digests.
    """
    if DIGEST not in table.columns or table[DIGEST].null_count() == table.height:
        raise DataError(
            f"{name}: has no digests of its files (column {DIGEST}); record them with: frameloom data verify {name} "
            "--out NEW.parquet"
        )
    wanted = dict(fold_members(table).select("path", DIGEST).iter_rows())
    problems: dict[str, str] = {}
    for path, found in digest_files(table, root, workers=workers).items():
        if found is None:
            problems[path] = "missing or unreadable"
        elif wanted[path] is None:
            problems[path] = "has no digest in its row"
        elif found != wanted[path]:
            problems[path] = "its bytes have changed"
    if problems:
        shown = [f"  {path}: {what}" for path, what in list(problems.items())[:_NUM_SHOWN]]
        more = [f"  and {len(problems) - len(shown):,} more"] if len(problems) > len(shown) else []
        raise DataError(
            f"{name}: {len(problems):,} of {len(wanted):,} files are not what they were; restore them from a copy, or "
            "record the digests anew with --out if the change is meant:\n" + "\n".join(shown + more)
        )
    return len(wanted)


def record_digests(table: pl.DataFrame, root: Path, *, name: str, workers: int = 4) -> pl.DataFrame:
    """The table with the digests of its files as they are now; DataError when one cannot be read."""
    found = digest_files(table, root, workers=workers)
    missing = [path for path, digest in found.items() if digest is None]
    if missing:
        raise DataError(
            f"{name}: {len(missing)} files cannot be read, the first is {missing[0]}; leave them out with frameloom "
            "data check"
        )
    digests = fold_members(table)["path"].replace_strict(found, return_dtype=pl.String())
    return table.with_columns(digests.alias(DIGEST))
