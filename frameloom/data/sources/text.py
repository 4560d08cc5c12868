"""Text from files of others: UTF-8 in whole letters, or a refusal that says where it is not."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

from frameloom.core.errors import DataError

_HALF = re.compile(r"[\ud800-\udfff]")
_HALF_ESCAPED = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u)")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error


def not_utf8(path: Path) -> DataError:
    """The refusal of a file that failed to decode, with the true place of its first wrong byte."""
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                place = f"{error.reason} at byte {start + error.start}"
                return DataError(f"{path}: line {number} is no UTF-8 text ({place}); convert it, e.g. with iconv")
            start += len(line)
    return DataError(f"{path}: changed while it was read; call again")


def has_whole_letters(text: str) -> bool:
    """False for text that UTF-8 cannot hold: half of a letter from JSON, or a file name in another encoding."""
    return _HALF.search(text) is None


def may_hold_half_letters(path: Path) -> bool:
    """Whether a JSON file has an escape that looks like half of a letter, which polars reads as a null byte."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _HALF_ESCAPED.search(content) is not None
