"""Reading text, JSON and JSON lines from outside files, with one clear message for what is damaged or not UTF-8."""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path
from typing import Any

from frameloom.core.errors import DataError, FrameloomError

KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
"""what a value of JSON is called; null is in none of them"""


def parse_object(text: str | bytes, *, where: str, error: type[FrameloomError], fix: str) -> dict[str, Any]:
    """`fix` ends the message: what to do about it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{where}: not JSON ({problem}); {fix}") from problem
    if not isinstance(value, dict):
        raise error(f"{where}: is {KINDS.get(type(value), 'null')}, expected a JSON object; {fix}")
    return value


def read_object(path: Path, *, error: type[FrameloomError], fix: str) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror}); {fix}") from problem
    return parse_object(text, where=str(path), error=error, fix=fix)


def read_lines(path: Path) -> list[str]:
    """With their line ends; empty if there is no file."""
    if not path.is_file():
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


def parse_record(line: str) -> dict[str, Any] | None:
    """None for a line that is cut off or damaged."""
    try:
        found = json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def read_records(path: Path) -> list[dict[str, Any]]:
    return [record for record in map(parse_record, read_lines(path)) if record is not None]


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
