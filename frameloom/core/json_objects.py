"""JSON objects from files and notes that somebody else has written: what is no object is one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from frameloom.core.errors import FrameloomError

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
