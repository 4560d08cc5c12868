"""What to sample: requests, from prompts on the command line or in a file with settings of their own."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from frameloom.config.schema.sampling import SampleSection
from frameloom.core.errors import DataError
from frameloom.core.spelling import suggest
from frameloom.core.text_files import parse_object

_MAX_PROMPT_CHARACTERS = 10_000
# Names of columns as other systems write them.
_ALIASES = {"text": "prompt", "caption": "prompt", "neg": "negative_prompt", "ref": "image"}
_FILE_COLUMNS = {"image": "head", "last_image": "tail", "video": "video", "mask": "mask", "control": "control"}
_COLUMNS = {field: column for column, field in _FILE_COLUMNS.items()}
MEDIA = tuple(_COLUMNS)
"""fields of a request that name files"""
_OWN = ("prompt", "seed", "name", *_FILE_COLUMNS)
# These belong to the model, which is loaded once.
_OF_MODEL = ("weights", "lora", "lora_scale", "lora_merge", "precision", "tile_px", "offload")
ROW_SETTINGS = tuple(name for name in SampleSection.model_fields if name not in _OF_MODEL)


@dataclass(frozen=True)
class Request:
    """One video to make; the same request gives the same video, alone or among others.

    `head` and `tail` are picture files given as the first and the last frame, `video` and `mask` what is continued or
    changed (see `conditions.py`), `control` what a control model follows. `settings` are those of the sampler unless a
    request has its own; `name` is that of the file.
    """

    prompt: str
    seed: int
    head: Path | None = None
    tail: Path | None = None
    video: Path | None = None
    mask: Path | None = None
    settings: SampleSection | None = None
    name: str | None = None
    control: Path | None = None


@dataclass(frozen=True)
class Row:
    """A prompt with what its row says besides; `where` is the file and line, for messages."""

    prompt: str
    seed: int | None = None
    name: str | None = None
    media: Mapping[str, Path] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    where: str = "--prompt"


def read_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """Prompts of the command line, then those of `file`; empty lines are skipped, none at all is an error."""
    return [row.prompt for row in read_rows(given, file)]


def read_rows(given: Sequence[str], file: Path | None) -> list[Row]:
    """The same with the settings of each row. A .csv or .jsonl file is a table, any other has one prompt per line."""
    rows = [Row(prompt) for prompt in given]
    if file is not None:
        reader = {".csv": _read_csv, ".jsonl": _read_jsonl}.get(file.suffix.lower(), _read_lines)
        rows += list(reader(file, _read_text(file)))
    if not rows:
        raise DataError('no prompt given; add --prompt "…" or --prompts FILE')
    for row in rows:
        if len(row.prompt) > _MAX_PROMPT_CHARACTERS:
            raise DataError(
                f"prompt '{row.prompt[:40]}…' has {len(row.prompt):,} characters; the limit is "
                f"{_MAX_PROMPT_CHARACTERS:,}"
            )
    return rows


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as text ({error}); give a UTF-8 file, one prompt per line") from error


def _read_lines(file: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield Row(line.strip(), where=f"{file}:{number}")


def _read_csv(file: Path, text: str) -> Iterator[Row]:
    table = csv.DictReader(io.StringIO(text, newline=""))
    for values in table:
        if None in values:
            raise DataError(f"{file}:{table.line_num}: has more values than columns; put text with commas into quotes")
        filled = {name: value for name, value in values.items() if value not in (None, "")}
        if filled:
            yield _make_row(filled, where=f"{file}:{table.line_num}", is_text=True)


def _read_jsonl(file: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        values = parse_object(line, where=where, error=DataError, fix='write {"prompt": "…", "seed": 1}')
        yield _make_row({name: value for name, value in values.items() if value is not None}, where=where)


def _make_row(values: Mapping[str, Any], *, where: str, is_text: bool = False) -> Row:
    """Columns by name; of a csv file, numbers are still text."""
    found: dict[str, Any] = {}
    for given, value in values.items():
        name = _ALIASES.get(given, given)
        if name not in _OWN and name not in ROW_SETTINGS:
            known = (*_OWN, *ROW_SETTINGS)
            raise DataError(
                f"{where}: has the column '{given}', which is not known; {suggest(given, known, kind='columns')}"
            )
        found[name] = value
    prompt = found.pop("prompt", None)
    if not isinstance(prompt, str):
        raise DataError(f"{where}: has no prompt; name that column 'prompt'")
    seed = found.pop("seed", None)
    try:
        seed = None if seed is None else int(str(seed))
    except ValueError:
        raise DataError(f"{where}: seed is '{seed}'; write a whole number") from None
    name = found.pop("name", None)
    media = {_FILE_COLUMNS[key]: Path(str(found.pop(key))) for key in tuple(found) if key in _FILE_COLUMNS}
    settings = {key: _read_number(value) for key, value in found.items()} if is_text else found
    return Row(prompt, seed, None if name is None else str(name), media, settings, where)


def _read_number(text: str) -> Any:
    """A number, true, false or null if it reads as one."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_media(rows: Sequence[Row], media: Mapping[str, Path]) -> None:
    """DataError for the first given file that is none, with the flag or the row that names it.

    `media` are those of the command line. Nothing but names is needed for this, so it comes before a model is loaded.
    """
    given = [(f"--{_COLUMNS[field].replace('_', '-')}", path) for field, path in media.items()]
    given += [(f"{row.where}: {_COLUMNS[field]}", path) for row in rows for field, path in row.media.items()]
    for where, path in given:
        if path.is_dir():
            raise DataError(f"{where} {path}: a folder; name a picture or a video in it")
        if not path.is_file():
            raise DataError(f"{where} {path}: no such file; name a picture or a video, from the folder you are in")


def expand_rows(
    rows: Sequence[Row],
    settings: SampleSection,
    *,
    first_seed: int,
    num_samples: int = 1,
    media: Mapping[str, Path] | None = None,
) -> list[Request]:
    """`num_samples` requests for each row, with seeds that count up from `first_seed` or from the row's own.

    `media` are files for all rows that do not name their own.
    """
    requests = []
    for number, row in enumerate(rows):
        chosen = _merge_settings(settings, row)
        seed = first_seed + number * num_samples if row.seed is None else row.seed
        files = {**(media or {}), **row.media}
        for sample in range(num_samples):
            requests.append(Request(row.prompt, seed + sample, **files, settings=chosen, name=row.name))
    return requests


def _merge_settings(settings: SampleSection, row: Row) -> SampleSection:
    if not row.settings:
        return settings
    try:
        return SampleSection.model_validate({**settings.model_dump(), **row.settings})
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{row.where}: {first['loc'][0]} is {first['input']!r}; {first['msg']}") from None
