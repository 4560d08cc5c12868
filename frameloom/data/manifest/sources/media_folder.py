"""A folder of videos and images; the caption of each is in a `.txt` of the same name beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from frameloom.core.errors import DataError
from frameloom.core.logging import get_logger
from frameloom.core.paths import safe_join
from frameloom.core.text_files import has_whole_letters, read_text
from frameloom.data.manifest.sources.columns import path_rules
from frameloom.data.media.decode import kind_of

_log = get_logger(__name__)
_MAX_CAPTION_BYTES = 1 << 20


def read_media_folder(folder: Path) -> pl.DataFrame:
    """A row per media file, ordered by path; hidden files and folders are left out, and so are names we cannot keep."""
    listed = _leave_out_odd(folder, list(_list_media(folder)))
    paths = [path for path, _ in listed]
    captions = [None if text is None else _read_caption(folder, text) for _, text in listed]
    missing = captions.count(None)
    if missing == len(paths):
        return pl.DataFrame({"path": paths}, schema={"path": pl.String})
    if missing:
        _log.warning(
            "%s: %d of %d files have no caption beside them; they get an empty one", folder, missing, len(paths)
        )
    return pl.DataFrame({"path": paths, "caption": captions}).with_columns(pl.col("caption").fill_null(""))


def _list_media(folder: Path) -> Iterator[tuple[str, str | None]]:
    """(path, path of its caption or None) of every media file."""
    for inner, names in _walk(folder):
        present = set(names)
        for name in names:
            if kind_of(name) is not None:
                caption = f"{os.path.splitext(name)[0]}.txt"
                yield f"{inner}{name}", f"{inner}{caption}" if caption in present else None


def _leave_out_odd(folder: Path, listed: list[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """One odd name must not end a scan of millions."""
    names = pl.DataFrame(
        {"path": [path if has_whole_letters(path) else None for path, _ in listed]}, {"path": pl.String}
    )
    is_odd = names.select(pl.any_horizontal(wrong for _, wrong, _ in path_rules()).fill_null(True)).to_series()
    odd = [path for (path, _), wrong in zip(listed, is_odd, strict=True) if wrong]
    if odd:
        _log.warning(
            "%s: %d of %d files are left out, the first is %r: their names are no UTF-8, or read like an address "
            "(x:y) or another system's path; rename them",
            *(folder, len(odd), len(listed), odd[0]),
        )
    return [entry for entry, wrong in zip(listed, is_odd, strict=True) if not wrong]


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
    return " ".join(read_text(path).split())
