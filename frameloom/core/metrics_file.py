"""The lines of a run's `metrics.jsonl`. A kill may cut the last one short, and a power cut may damage others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[str]:
    """With their ends; none of a file that is not there."""
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
