"""Atomic writing of files and folders (complete or absent), and their digests.

A writer works beside the final place, syncs, and renames once; a crash leaves at most a name that
starts with `.partial-`, which readers ignore and `remove_partial` deletes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

PARTIAL = ".partial-"


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _naming(path: Path, temporary: Path) -> Iterator[None]:
    """Errors name the final path: not the temporary, which nobody knows, nor none, as those of a full disk do."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        for key in ("filename", "filename2"):
            if isinstance(name := getattr(error, key), str | Path):
                setattr(error, key, str(name).replace(temporary.name, path.name))
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; it becomes `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: video writers choose the container by it.
    temporary = path.with_name(f"{PARTIAL}{uuid4().hex[:8]}-{path.name}")
    try:
        with _naming(path, temporary):
            yield temporary
            sync_file(temporary)
            os.replace(temporary, path)
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder; it becomes `path` when the block ends. `path` must not exist yet."""
    if path.exists():
        raise FileExistsError(f"{path} exists; a finished folder is never written twice")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{PARTIAL}{uuid4().hex[:8]}-{path.name}")
    temporary.mkdir()
    try:
        with _naming(path, temporary):
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    sync_file(file)
            sync_folder(temporary)
            os.rename(temporary, path)
            sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` when the block ends without an error, whatever was there."""
    old = folder.with_name(f"{PARTIAL}{uuid4().hex[:8]}-old")
    fresh = folder.with_name(f"{PARTIAL}{uuid4().hex[:8]}-new")
    with atomic_folder(fresh) as temporary:
        yield temporary
    if folder.exists():
        os.rename(folder, old)
    os.rename(fresh, folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Clear what a killed writer left in `folder`; only call while nobody else writes there."""
    for leftover in folder.glob(f"{PARTIAL}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def digest_file(path: Path) -> str:
    """SHA-256 of the content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_value(value: Any) -> str:
    """SHA-256 of a JSON-like value; key order does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def spill(owner: object, suffix: str, write: Callable[[Path], object]) -> Path:
    """A temporary file of what `owner` holds, for other processes to map; it is removed with `owner`."""
    descriptor, name = tempfile.mkstemp(prefix="frameloom-", suffix=suffix)
    os.close(descriptor)
    path = Path(name)
    weakref.finalize(owner, path.unlink, missing_ok=True)
    write(path)
    return path
