"""Reading and writing of YAML values, with the line of every key.

Plain scalars follow YAML 1.2: `1e-5` is a number, `yes`, `on` and dates stay text. Tags are refused, so nothing in
a recipe can make an object; aliases are copied and counted, so a small file cannot grow into a huge value.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Never

import yaml  # type: ignore[import-untyped]

from frameloom.core.errors import ConfigError

KeyPath = tuple[str, ...]
"""Where a value stands: `("optim", "lr")`; items of lists are counted from "0"."""

MAX_BYTES = 256 * 1024
MAX_VALUES = 10_000
MAX_DEPTH = 32
_CORE_TAG = "tag:yaml.org,2002:"

_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_PLAIN = re.compile(r"[A-Za-z0-9_./+-][A-Za-z0-9_./+:-]*")
_PRINTABLE = re.compile(r"[ -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}

# What PyYAML says, and what a person can do about it.
_HINTS = (
    ("\\t", "indent with spaces, not with tabs"),
    ("mapping values are not allowed", "check the indentation, and put text that holds ': ' in quotes"),
    ("could not find expected ':'", "write 'key: value', with a space after the colon"),
    ("expected <block end>", "keys of one section start in the same column"),
    ("expected ',' or", "a bracket was opened and not closed"),
    ("cannot start any token", "put the value in quotes"),
    ("unexpected end of stream", "a quote was opened and not closed"),
)


def parse_scalar(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar."""
    if text in _WORDS or (text.lower() in _WORDS and text in (text.title(), text.upper())):
        return _WORDS[text.lower()]
    if len(text) <= 400 and _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def parse_value(text: str, *, where: str) -> Any:
    """One value, as it would stand behind a key in a recipe: `1e-5`, `[1.0, 45]`, `null`."""
    return _Builder(text, where, counts_lines=False).build()[0]


def parse_document(text: str, *, where: str) -> tuple[Any, dict[KeyPath, int]]:
    """A whole file and the line, counted from 1, of each key and list item in it."""
    return _Builder(text, where, counts_lines=True).build()


@dataclass
class _Builder:
    """Builds values straight from parser events, so that a hostile file is refused before it is expanded."""

    text: str
    where: str
    counts_lines: bool
    lines: dict[KeyPath, int] = field(default_factory=dict)
    anchors: dict[str, tuple[Any, int]] = field(default_factory=dict)
    num_values: int = 0

    def build(self) -> tuple[Any, dict[KeyPath, int]]:
        try:
            self.events: Iterator[Any] = iter(yaml.parse(self.text, Loader=yaml.SafeLoader))
            next(self.events)  # stream start
            if isinstance(next(self.events), yaml.StreamEndEvent):
                return None, self.lines
            value = self._value(next(self.events), ())
            next(self.events)  # document end
            rest = next(self.events)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            problem = " ".join(part for part in (error.context, error.problem) if part)
            hint = next((hint for sign, hint in _HINTS if sign in problem), "compare with `frameloom recipe show`")
            self._fail(mark.line + 1 if mark else 1, f"not valid YAML: {problem}; {hint}")
        except yaml.reader.ReaderError as error:
            line = self.text.count("\n", 0, error.position) + 1
            text = f"character {error.character:#x} is not text; remove it or write it as an escape in quotes"
            self._fail(line, text)
        if not isinstance(rest, yaml.StreamEndEvent):
            text = "a second document starts here; keep one document per file, without '---'"
            self._fail(rest.start_mark.line + 1, text)
        return value, self.lines

    def _value(self, event: Any, path: KeyPath) -> Any:
        line = event.start_mark.line + 1
        if path:
            self.lines[path] = line
        if len(path) > MAX_DEPTH:
            self._fail(line, f"values nest deeper than {MAX_DEPTH}; a recipe needs far less")
        is_alias, first = isinstance(event, yaml.AliasEvent), self.num_values
        if is_alias and event.anchor not in self.anchors:
            self._fail(line, f"*{event.anchor} has no finished &{event.anchor} above it; give the anchor first")
        self.num_values += self.anchors[event.anchor][1] if is_alias else 1
        if self.num_values > MAX_VALUES:
            self._fail(line, f"more than {MAX_VALUES} values, aliases counted in full; a recipe needs far less")
        if is_alias:
            return copy.deepcopy(self.anchors[event.anchor][0])
        if event.tag is not None:
            tag = shorten(event.tag.replace(_CORE_TAG, "!!"))
            self._fail(line, f"found the tag {tag}; recipes hold plain values only, remove it")
        value: Any
        if isinstance(event, yaml.MappingStartEvent):
            value = self._mapping(path)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(item := next(self.events), yaml.SequenceEndEvent):
                value.append(self._value(item, (*path, str(len(value)))))
        else:
            value = parse_scalar(event.value) if event.style is None else str(event.value)
            if isinstance(value, float) and not math.isfinite(value):
                self._fail(line, f"the number {shorten(event.value)} is too large")
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.num_values - first)
        return value

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            line = event.start_mark.line + 1
            if not isinstance(event, yaml.ScalarEvent) or event.tag is not None:
                self._fail(line, "a key is not plain text; write 'key: value'")
            if event.value == "<<" and event.style is None:
                self._fail(line, "'<<' is not read; inherit from another file with _base_")
            number = parse_scalar(event.value) if event.style is None else None
            key = str(number) if type(number) is int else str(event.value)
            if key in result:
                first = self.lines[(*path, key)]
                self._fail(line, f"the key '{shorten(key)}' stands twice, first on line {first}; keep one of them")
            result[key] = self._value(next(self.events), (*path, key))
            self.lines[(*path, key)] = line
        return result

    def _fail(self, line: int, text: str) -> Never:
        raise ConfigError(f"{f'{self.where}:{line}' if self.counts_lines else self.where}: {text}")


def read_text(path: Path, *, shown: str) -> str:
    """The text of a recipe file; `shown` is how messages name it."""
    try:
        if not path.exists():
            raise ConfigError(f"{shown}: no such file; `frameloom recipe list` shows the shipped recipes")
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "not an ordinary file"
            raise ConfigError(f"{shown}: this is {kind}; name a recipe file (.yaml)")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{shown}: cannot be read ({reason}); check the path and its permissions") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{shown}: {len(data)} bytes, a recipe has at most {MAX_BYTES}; is this the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{shown}:{line}: not UTF-8 text (byte {data[error.start]:#04x}); save it as UTF-8"
        ) from error


def format_value(value: Any) -> str:
    """The value as one line of YAML that `parse_value` reads back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        # The shortest text that reads back as the same float: 0.25, 1e-4, 1e16.
        text = f"{Decimal(repr(value)):e}" if 0 < abs(value) < 1e-3 else repr(float(value))
        return text.replace("e+", "e").replace("e-0", "e-")
    if isinstance(value, str):
        return value if _is_plain(value) else quote(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{format_key(key)}: {format_value(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(format_value(item) for item in value) + "]"


def shorten(text: str, width: int = 80) -> str:
    """`text`, cut to `width` for a message."""
    return text if len(text) <= width else text[: width - 3] + "..."


def format_key(key: Any) -> str:
    """A key that reads back as the same text; `9` stays a number for the eye."""
    text = str(key)
    return text if text.isdecimal() or (text and _is_plain(text)) else quote(text)


def quote(text: str) -> str:
    """`text` in double quotes, with escapes for what YAML does not allow as it is."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return '"' + "".join(one if _PRINTABLE.fullmatch(one) else f"\\U{ord(one):08x}" for one in escaped) + '"'


def _is_plain(text: str) -> bool:
    return (
        bool(_PLAIN.fullmatch(text))
        and not text.startswith(("-", "..."))
        and not text.endswith(":")
        and parse_scalar(text) == text
    )
