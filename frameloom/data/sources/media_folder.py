"""A plain folder of videos and images, each with its caption in a `.txt` of the same name beside it, or with none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from frameloom.core.errors import DataError
from frameloom.core.log import get_logger
from frameloom.core.paths import safe_join
from frameloom.data.sources.columns import kind_of

_log = get_logger(__name__)
_MAX_CAPTION_BYTES = 1 << 20


def read_media_folder(folder: Path) -> pl.DataFrame:
    """A row per media file, ordered by path; hidden files and folders are left out."""
    paths: list[str] = []
    captions: list[str | None] = []
    for inner, names in _walk(folder):
        present = set(names)
        for name in names:
            if kind_of(name) is None:
                continue
            relative = f"{inner}{name}"
            caption = f"{os.path.splitext(name)[0]}.txt"
            paths.append(relative)
            captions.append(_read_caption(folder, f"{inner}{caption}") if caption in present else None)
    missing = captions.count(None)
    if missing == len(paths):
        return pl.DataFrame({"path": paths}, schema={"path": pl.String})
    if missing:
        _log.warning(
            "%s: %d of %d files have no caption beside them; they get an empty one", folder, missing, len(paths)
        )
    return pl.DataFrame({"path": paths, "caption": captions}).with_columns(pl.col("caption").fill_null(""))


def has_media(folder: Path) -> bool:
    return any(kind_of(name) is not None for _, names in _walk(folder) for name in names)


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """(folder below `folder` with a slash behind it, sorted file names); links to folders are not followed."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inner = Path(place).relative_to(folder).as_posix()
        yield "" if inner == "." else f"{inner}/", sorted(name for name in files if not name.startswith("."))


def _read_caption(folder: Path, relative: str) -> str:
    # A link could otherwise carry any file of the machine into the captions.
    path = safe_join(folder, relative, where="caption")
    if not path.is_file() or path.stat().st_size > _MAX_CAPTION_BYTES:
        raise DataError(f"{path}: not a plain file of at most {_MAX_CAPTION_BYTES} bytes; captions are short texts")
    try:
        return " ".join(path.read_text(encoding="utf-8-sig").split())
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: no UTF-8 text ({error.reason} at byte {error.start}); convert it") from error
