"""The record of a run as a part of a page: a table for every comparison, and curves of what grows.

A page keeps its own text; what stands between the two marks is replaced. Pictures go into the folder `images` beside
it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from frameloom.bench.curves import Line, draw_curves
from frameloom.bench.harness import Row
from frameloom.bench.table import row_cells
from frameloom.bench.topics import TOPICS
from frameloom.core.errors import DataError
from frameloom.core.files import write_text

BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
_HEADER = ("", "ours", "the other", "ratio", "processor", "the other's", "times", "the other")


@dataclass(frozen=True)
class _Record:
    """What a record must have for a page to be made of it."""

    date: str
    machine: str
    versions: dict[str, str | None]
    quick: bool
    rows: list[Row]


def read_record(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """A record and its rows; DataError unless a page can be made of it."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        TypeAdapter(_Record).validate_python(found)
        rows = [Row.from_json(values) for values in found["rows"]]
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DataError(f"{path}: not a file that frameloom bench --json wrote ({reason})") from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not a file that frameloom bench --json wrote ({error})") from error
    unknown = [row.topic for row in rows if row.topic not in TOPICS]
    if unknown:
        raise DataError(f"{path}: has rows of '{unknown[0]}', which is no comparison; known: {', '.join(TOPICS)}")
    return found, rows


def read_page(page: Path) -> tuple[str, str]:
    """What stands before and after the place of the table, marks included; DataError where there is no such place."""
    if not page.is_file():
        raise DataError(f"{page}: no such page; make it, with the lines {BEGIN} and {END} where the table goes")
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise DataError(f"{page}: it should have the lines {BEGIN} and {END} once each, between which the table goes")
    return text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]


def write_page(page: Path, record: Mapping[str, Any]) -> None:
    """Put the rows of a record into `page`."""
    before, after = read_page(page)
    rows = [Row.from_json(values) for values in record["rows"]]
    pictures = _draw(rows)
    folder = page.parent / "images"
    for name, content in pictures.items():
        folder.mkdir(exist_ok=True)
        write_text(folder / name, content)
    write_text(page, f"{before}\n\n{render(record, rows, list(pictures))}\n\n{after}")


def render(record: Mapping[str, Any], rows: Sequence[Row], pictures: Sequence[str]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    parts = [f"Measured on {record['date']}: {record['machine']}. {versions}."]
    if record["quick"]:
        parts.append("**A quick run on small inputs: these numbers mean nothing.**")
    for topic in dict.fromkeys(row.topic for row in rows):
        about = TOPICS[topic].about
        parts.append(f"### {about[0].upper()}{about[1:]} (`frameloom bench {topic}`)")
        parts.append(_table([row for row in rows if row.topic == topic]))
        parts += [f"![{_title(name)}](images/{name})" for name in pictures if name.startswith(f"growth-{topic}-")]
    return "\n\n".join(parts)


def _title(name: str) -> str:
    _, topic, axis = name.removesuffix(".svg").split("-", 2)
    return f"{topic} by {axis}"


def _table(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(_HEADER) + " |", "|---" + "|--:" * 6 + "|---|"]
    for row in rows:
        cells = row_cells(row)
        cells[0] = row.name
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _draw(rows: Sequence[Row]) -> dict[str, str]:
    """A picture for each comparison, axis and unit with at least two places: ours and the other."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.at is not None and row.ours is not None:
            groups.setdefault((row.topic, row.at[0], row.unit), []).append(row)
    pictures = {}
    for (topic, axis, unit), group in groups.items():
        lines = [line for line in _lines(group) if len(line.points) > 1]
        if lines:
            name = f"growth-{topic}-{axis}{'-memory' if unit == 'B' else ''}.svg"
            pictures[name] = draw_curves(f"{topic}: {TOPICS[topic].about}", lines, axis=axis, unit=unit)
    return pictures


def _lines(rows: Sequence[Row]) -> list[Line]:
    """One line for ours and one for each kind of other; a name's first word tells several of ours apart."""
    firsts = dict.fromkeys(row.name.partition(":")[0] if ":" in row.name else "" for row in rows)
    found = []
    for first in firsts:
        own = [row for row in rows if (row.name.partition(":")[0] if ":" in row.name else "") == first]
        found.append(Line(first or "ours", tuple((row.at[1], row.ours) for row in own if row.at and row.ours)))
        others = tuple((row.at[1], row.other) for row in own if row.at and row.other)
        found.append(Line(own[0].against.partition(",")[0], others, is_ours=False))
    return found
