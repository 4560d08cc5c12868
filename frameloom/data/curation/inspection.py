"""Inspection of one file by `data scan` and `data check`: its header, and on request test decoding, hashes, a digest.

Worker processes preload this module, so it must not import polars, whose threads a fork would lose.
Shape letters: K frames of a clip, H height, W width, C colours.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frameloom.core.errors import DataError, RunError
from frameloom.core.process_pool import Heartbeat, Lost, ProcessPool
from frameloom.data.curation.frame_signatures import SIDE_PX, sign_frames
from frameloom.data.media.decode import (
    ClipError,
    Media,
    MediaFacts,
    probe_clip,
    read_clip,
    read_image,
)
from frameloom.data.media.probe import expected_content, probe_header, sniff_content
from frameloom.data.media.tar_members import Member, count_bytes, find_media, open_bytes

# Reasons a file is not used, as they stand in the lists of bad files.
MISSING = "missing"
OUTSIDE = "outside the root"
NO_FILE = "not a plain file"
EMPTY = "empty file"
WRONG_EXTENSION = "wrong extension"
UNREADABLE = "unreadable"
STUCK = "stuck or crashed"

_AUDIT_PX = 64
_SHORT_FRAMES = 300
_AHEAD = 32  # files before each worker, so that none waits for this process

Record = dict[str, Any]
"""what is found out about a file, by column name"""


@dataclass(frozen=True)
class Job:
    """One file below the root; `size` and `mtime_ns` are those of an earlier result, which is good while they hold.

    `member` is (name, first byte, number of bytes) inside the tar that `path`, up to the name, leads to.
    """

    path: str
    size: int | None = None
    mtime_ns: int | None = None
    is_audited: bool = False
    member: tuple[str, int, int] | None = None


@dataclass(frozen=True)
class WorkOptions:
    """`workers` 0 works in this process, without a time limit."""

    workers: int = 4
    timeout_s: float = 60.0


def run_jobs(work: Callable[[Job], Record], jobs: Iterable[Job], options: WorkOptions) -> Iterator[Record]:
    """The results in the order they come in.

    A file that ends or stalls its worker gets a record that says so, and all others are done.
    """
    guarded, workers = partial(_guard, work), options.workers
    if workers == 0:
        yield from (guarded(job) for job in jobs)
        return

    def blame(lost: Lost, job: Job | None) -> Record | None:
        if not lost.has_started or lost.in_a_row > workers + 2:
            raise RunError(
                f"a worker process {lost.what} while starting; look for a lack of memory or try fewer --workers"
            )
        return None if job is None else blame_file(job, f"its reader {lost.what}")

    pool: ProcessPool[Job, Record] = ProcessPool(
        guarded, num_workers=workers, timeout_s=options.timeout_s, ahead=_AHEAD, name="scan"
    )
    yield from pool.run(jobs, blame, in_order=False)


def _guard(work: Callable[[Job], Record], job: Job, heartbeat: Heartbeat = lambda note: None) -> Record:
    """An unexpected exception at one file becomes its record; it must not end the work on a million others."""
    try:
        return work(job)
    except Exception as error:
        return blame_file(job, f"made its reader fail ({type(error).__name__}: {error})")


@dataclass(frozen=True)
class FileWork:
    """Inspects a file: its header always, `signatures` and `digests` if asked; a job may ask for frames to be decoded.

    A record has `size` and `mtime_ns` (null for a missing file), `unchanged` when they are those of the job, and either
    the facts of the header or a `reason` with its `error`.
    """

    root: Path
    signatures: bool = False
    digests: bool = False

    def __call__(self, job: Job) -> Record:
        record: Record = {"path": job.path, "size": None, "mtime_ns": None, "audited": job.is_audited}
        try:
            path = find_media(self.root, job.path, job.member)
        except (DataError, OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
            return record | {"reason": OUTSIDE, "stage": "header", "error": str(error)}
        facts: MediaFacts | None = None
        try:
            found = os.stat(path.tar if isinstance(path, Member) else path)
            record |= {"size": count_bytes(path), "mtime_ns": found.st_mtime_ns}
            if job.size == record["size"] and job.mtime_ns == found.st_mtime_ns:
                return record | {"unchanged": True}
            facts = probe_header(path)
            record |= asdict(facts)
            if job.is_audited:
                audit_clip(path, facts)
            if self.signatures:
                hashes_K, colours = sign_clip(path, facts)
                record |= {"hashes": hashes_K.tobytes(), "colours": colours}
            if self.digests:
                with open_bytes(path) as file:
                    record["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
            return record
        except (DataError, OSError) as error:
            reason, detail = explain_failure(path, error)
            stage = "header" if facts is None else "decode"
            return record | {"reason": reason, "stage": stage, "error": detail}


def blame_file(job: Job, what: str) -> Record:
    """The record of a file that gave none; it has no size, so the next call tries it again."""
    error = f"{job.path}: {what}; look at the file, or call again with a larger --timeout"
    return {"path": job.path, "size": None, "mtime_ns": None, "audited": job.is_audited} | {
        "reason": STUCK,
        "stage": "decode" if job.is_audited else "header",
        "error": error,
    }


def explain_failure(path: Media, error: Exception) -> tuple[str, str]:
    """(reason, text) of a file that could not be used; the ending is blamed when the content is something else."""
    text = str(error)
    try:
        found = os.stat(path.tar if isinstance(path, Member) else path)
        if not stat.S_ISREG(found.st_mode):
            return NO_FILE, text
        if not found.st_size:
            return EMPTY, text
        content, expected = sniff_content(path), expected_content(path)
    except FileNotFoundError:
        return MISSING, f"{path}: no such file; check the manifest" if isinstance(error, OSError) else text
    except OSError as second:
        return UNREADABLE, f"{path}: cannot be opened ({second.strerror}); check its rights"
    if expected is None or (content is not None and content != expected):
        return WRONG_EXTENSION, f"{text} (its content is {content or 'unknown'})"
    return UNREADABLE, text


def audit_clip(path: Media, facts: MediaFacts) -> None:
    """Decode the first, the middle and the last frame; ClipError when one is damaged, or the header is wrong.

    A short video is decoded as a whole, so that a picture that changes its size is seen.
    """
    if facts.kind == "image":
        read_image(path, height=_AUDIT_PX, width=_AUDIT_PX)
        return
    first = probe_clip(path)
    if (first.height, first.width) != (facts.height, facts.width):
        raise ClipError(
            f"{path}: the first frame has {first.width}x{first.height} pixels, the header says "
            f"{facts.width}x{facts.height}; write the file again or leave it out"
        )
    indices = sorted({0, facts.frames // 2, facts.frames - 1})
    for wanted in [indices] if facts.frames <= _SHORT_FRAMES else [[index] for index in indices]:
        read_clip(path, indices=wanted, height=_AUDIT_PX, width=_AUDIT_PX)


def sign_clip(path: Media, facts: MediaFacts) -> tuple[NDArray[np.uint64], bytes]:
    """Of three frames of a video (a sixth, a half and five sixths into it), or of the image itself."""
    if facts.kind == "image":
        frames = [read_image(path, height=SIDE_PX, width=SIDE_PX)]
    else:
        indices = [facts.frames * part // 6 for part in (1, 3, 5)]
        frames = [read_clip(path, indices=[index], height=SIDE_PX, width=SIDE_PX) for index in indices]
    return sign_frames(np.stack([pixels_CFHW[:, 0].permute(1, 2, 0).numpy() for pixels_CFHW in frames]))
