"""Requests from prompts: on the command line, from Python, or in a file whose rows have settings of their own."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from frameloom.config.loading.schema_tree import field_kind, format_type
from frameloom.config.schema.sampling import MEDIA, MODEL_SETTINGS, SampleRequest, SampleSection
from frameloom.core.errors import ConfigError, DataError, FrameloomError
from frameloom.core.spelling import suggest
from frameloom.core.text_files import parse_object

_MAX_PROMPT_CHARACTERS = 10_000
FIELDS = tuple(name for name in SampleRequest.model_fields if name not in MODEL_SETTINGS)
"""what one request may set; the settings of a model are those it was loaded with"""
# Names of columns as other systems write them.
_ALIASES = {"text": "prompt", "caption": "prompt", "neg": "negative_prompt", "negative": "negative_prompt"}
_ALIASES |= {"ref": "image"}


def make_request(
    values: Mapping[str, Any], *, where: str, kind: str = "fields", error: type[FrameloomError] = ConfigError
) -> SampleRequest:
    """A request from values by field; its `model_fields_set` are those that were given, the rest are defaults."""
    named = {_ALIASES.get(name, name): value for name, value in values.items()}
    for name in values:
        if _ALIASES.get(name, name) not in FIELDS:
            raise error(
                f"{where}: has the {kind.removesuffix('s')} '{name}', which is not known; "
                f"{suggest(name, FIELDS, kind=kind)}"
            )
    try:
        request = SampleRequest.model_validate(named)
    except ValidationError as problem:
        name = str(problem.errors()[0]["loc"][0])
        expected = format_type(field_kind(SampleRequest.model_fields[name]))
        raise error(f"{where}: {name} is {named[name]!r}, expected {expected}") from None
    if len(request.prompt) > _MAX_PROMPT_CHARACTERS:
        raise error(
            f"{where}: the prompt '{request.prompt[:40]}…' has {len(request.prompt):,} characters; the limit is "
            f"{_MAX_PROMPT_CHARACTERS:,}"
        )
    return request


def complete_request(request: SampleRequest, settings: SampleSection) -> SampleRequest:
    """The request with everything that it does not say itself as in `settings`."""
    given = request.model_fields_set
    own = {name: getattr(settings, name) for name in SampleSection.model_fields if name not in given}
    return request.model_copy(update=own)


def read_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """Prompts of the command line, then those of `file`; empty lines are skipped, none at all is an error."""
    return [request.prompt for _, request in _read(given, file)]


def read_requests(
    given: Sequence[str], file: Path | None, common: Mapping[str, Any] | None = None
) -> list[SampleRequest]:
    """The same with the fields that each row sets, and those of `common` where it does not.

    A .csv or .jsonl file is a table, any other has one prompt per line. Files that a row or `common` names must exist:
    this is known before a model is loaded.
    """
    common = common or {}
    check_media({f"--{name.replace('_', '-')}": path for name, path in common.items() if name in MEDIA})
    requests = []
    for where, request in _read(given, file):
        values = {name: getattr(request, name) for name in request.model_fields_set}
        check_media({f"{where}: {name}": path for name, path in values.items() if name in MEDIA})
        requests.append(make_request({**common, **values}, where=where))
    return requests


def _read(given: Sequence[str], file: Path | None) -> list[tuple[str, SampleRequest]]:
    """(where, request) of each; `where` is for messages."""
    rows = [("--prompt", make_request({"prompt": prompt}, where="--prompt", error=DataError)) for prompt in given]
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{file}: cannot be read as text ({error}); give a UTF-8 file, one prompt per line"
            ) from error
        for line, values in (_read_csv if file.suffix.lower() == ".csv" else _read_lines)(file, text):
            where = f"{file}:{line}"
            request = make_request(values, where=where, kind="columns", error=DataError)
            if "prompt" not in request.model_fields_set:
                raise DataError(f"{where}: has no prompt; name that column 'prompt'")
            rows.append((where, request))
    if not rows:
        raise DataError('no prompt given; add --prompt "…" or --prompts FILE')
    return rows


def _read_lines(file: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """A prompt on each line, or in a .jsonl file an object."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and file.suffix.lower() == ".jsonl":
            values = parse_object(
                line, where=f"{file}:{number}", error=DataError, fix='write {"prompt": "…", "seed": 1}'
            )
            yield number, {name: value for name, value in values.items() if value is not None}
        elif line.strip():
            yield number, {"prompt": line.strip()}


def _read_csv(file: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers, true, false and null are read as such in columns that are not text."""
    table = csv.DictReader(io.StringIO(text, newline=""))
    for row in table:
        if None in row:
            raise DataError(f"{file}:{table.line_num}: has more values than columns; put text with commas into quotes")
        values: dict[str, Any] = {name: value for name, value in row.items() if value not in (None, "")}
        for name, text in values.items():
            field = SampleRequest.model_fields.get(_ALIASES.get(name, name))
            if field is not None and _ALIASES.get(name, name) not in MEDIA and not field_kind(field).accepts(str):
                with suppress(ValueError):
                    values[name] = json.loads(text)
        if values:
            yield table.line_num, values


def check_media(named: Mapping[str, Path | None]) -> None:
    """DataError for the first file that does not exist, with the flag or the row that names it."""
    for where, path in named.items():
        if path is None:
            continue
        if path.is_dir():
            raise DataError(f"{where} {path}: a folder; name a picture or a video in it")
        if not path.is_file():
            raise DataError(f"{where} {path}: no such file; name a picture or a video, from the folder you are in")
