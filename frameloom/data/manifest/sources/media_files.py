"""Media files without a table: folders of videos and images, and webdataset tar shards, read in place.

In a folder the caption of each file is in a `.txt` of the same name beside it. In a tar, members of one sample share
the part of their name before the first dot: `0001.mp4`, `0001.txt`, `0001.json`. A tar is never unpacked, so a member's
name cannot lead anywhere; `data/media/tar_members.py` opens one as a slice of its tar.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from frameloom.core.errors import DataError
from frameloom.core.logging import get_logger
from frameloom.core.paths import safe_join
from frameloom.core.text_files import has_whole_letters, parse_object, read_text
from frameloom.data.manifest.sources.columns import ALIASES, path_rules
from frameloom.data.manifest.sources.text_tables import Entry, entries_to_table
from frameloom.data.media.decode import kind_of

_log = get_logger(__name__)
_MAX_TEXT_BYTES = 1 << 20
_CAPTION_KEYS = ("caption", *ALIASES["caption"], "text_english")


def read_media_folder(folder: Path) -> pl.DataFrame:
    """A row per media file, ordered by path; hidden files and folders are left out, and so are names we cannot keep."""
    listed: list[tuple[str, str | None]] = []  # (path, path of its caption)
    for inner, names in _walk(folder):
        present = set(names)
        for name in names:
            if kind_of(name) is not None:
                caption = f"{os.path.splitext(name)[0]}.txt"
                listed.append((f"{inner}{name}", f"{inner}{caption}" if caption in present else None))
    # One odd name must not end a scan of millions.
    usable = pl.DataFrame(
        {"path": [path if has_whole_letters(path) else None for path, _ in listed]}, {"path": pl.String}
    )
    is_odd = usable.select(pl.any_horizontal(wrong for _, wrong, _ in path_rules()).fill_null(True)).to_series()
    odd = [path for (path, _), wrong in zip(listed, is_odd, strict=True) if wrong]
    if odd:
        _log.warning(
            "%s: %d of %d files are left out, the first is %r: their names are no UTF-8, or read like an address "
            "(x:y) or another system's path; rename them",
            *(folder, len(odd), len(listed), odd[0]),
        )
    kept = [entry for entry, wrong in zip(listed, is_odd, strict=True) if not wrong]
    paths = [path for path, _ in kept]
    captions: list[str | None] = []
    for _, text in kept:
        if text is None:
            captions.append(None)
            continue
        # A link could otherwise carry any file of the machine into the captions.
        file = safe_join(folder, text, where="caption")
        if not file.is_file() or file.stat().st_size > _MAX_TEXT_BYTES:
            raise DataError(f"{file}: not a plain file of at most {_MAX_TEXT_BYTES} bytes; captions are short texts")
        captions.append(" ".join(read_text(file).split()))
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
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inner = Path(path).relative_to(folder).as_posix()
        yield "" if inner == "." else f"{inner}/", sorted(name for name in files if not name.startswith("."))


def read_tars(tars: list[Path], folder: Path) -> pl.DataFrame:
    """A row per sample: `path` is the tar's below `folder`, `member` the name in it, `offset` and `bytes` its place."""
    source = str(tars[0].parent if len(tars) > 1 else tars[0])
    return entries_to_table((row for tar in tars for row in _samples(tar, folder)), source=source)


def find_tars(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.tar") if path.is_file() and not path.name.startswith("."))


def _samples(tar: Path, root: Path) -> Iterator[Entry]:
    relative = tar.relative_to(root).as_posix()
    groups: dict[str, list[tarfile.TarInfo]] = {}
    for info in _members(tar):
        folder, _, name = info.name.rpartition("/")
        groups.setdefault(f"{folder}/{name.split('.', 1)[0]}", []).append(info)
    without = 0
    with tar.open("rb") as file:
        for infos in groups.values():
            # A video before an image, a plain name (1.png) before one with parts (1.mask.png).
            candidates = [info for info in infos if kind_of(info.name) and info.size]
            media = min(
                candidates, key=lambda info: (kind_of(info.name) != "video", info.name.count(".")), default=None
            )
            if media is None:
                without += 1
                continue
            row = _read_texts(tar, file, infos)
            row |= {"path": relative, "member": media.name, "offset": media.offset_data, "bytes": media.size}
            yield f"{tar.name}: {media.name}", row | {"kind": kind_of(media.name)}
    if without:
        _log.warning("%s: %d of %d samples have no video or image; they are left out", tar, without, len(groups))


def _members(tar: Path) -> Iterator[tarfile.TarInfo]:
    size = tar.stat().st_size
    try:
        # Names in other encodings stay different from each other; they are only labels, so nothing is lost.
        with tarfile.open(tar, "r:", errors="backslashreplace") as archive:
            for info in archive:
                if info.isreg() and not os.path.basename(info.name).startswith("."):
                    if info.offset_data + info.size > size or info.issparse():
                        raise DataError(f"{tar}: cut off in '{info.name}'; copy the file again")
                    yield info
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{tar}: not a readable tar ({error}); copy it again, or unpack a compressed one") from error


def _read_texts(tar: Path, file: io.BufferedReader, infos: list[tarfile.TarInfo]) -> dict[str, Any]:
    """What `.json` says, and the caption from `.txt` or from one of the usual keys of the `.json`."""
    row: dict[str, Any] = {}
    caption: str | None = None

    def read(info: tarfile.TarInfo) -> str:
        if info.size > _MAX_TEXT_BYTES:
            raise DataError(f"{tar}: '{info.name}' has {info.size} bytes; captions have at most {_MAX_TEXT_BYTES}")
        file.seek(info.offset_data)
        try:
            return file.read(info.size).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{tar}: '{info.name}' is no UTF-8 text ({error.reason}); write it again") from error

    for info in infos:
        suffix = os.path.splitext(info.name)[1].lower()
        if suffix == ".json":
            where = f"{tar}: '{info.name}'"
            found = parse_object(read(info), where=where, error=DataError, fix="write it again")
            caption = caption or next((found[key] for key in _CAPTION_KEYS if isinstance(found.get(key), str)), None)
            # Lists and objects differ from sample to sample too much to be columns.
            row |= {key: value for key, value in found.items() if isinstance(value, str | int | float | bool)}
        elif suffix in (".txt", ".caption"):
            caption = " ".join(read(info).split())
    for name in (*_CAPTION_KEYS[:-1], *ALIASES["path"], *ALIASES["kind"]):
        row.pop(name, None)
    return row | {"caption": caption or ""}
