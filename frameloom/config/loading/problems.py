"""Validation of a plain recipe against the schema, with pydantic's errors rewritten as messages that help."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from annotated_types import Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from frameloom.config.loading.schema_tree import (
    ROOT,
    Kind,
    default_of,
    example_of,
    explain_unknown,
    field_at,
    field_kind,
    format_type,
    join_words,
    kind_at,
    readers_of,
    walk,
)
from frameloom.config.loading.yaml_values import KeyPath, format_value, quote, shorten
from frameloom.config.schema.recipe import Recipe

_SWITCHES = {"yes", "no", "on", "off", "y", "n", "true", "false"}

# A file with thousands of mistakes is the wrong file; nobody reads on.
MAX_EXPLAINED = 25


@dataclass(frozen=True)
class Problem:
    """A mistake at `path`; `also` are the other keys that the finding rests on."""

    path: KeyPath
    text: str
    also: tuple[KeyPath, ...] = ()


def explain_reader(path: KeyPath, value: Any, chooser: str, found: Any, values: Sequence[Any]) -> Problem:
    """A key that only some values of `chooser`, a key of the same section, read."""
    section, readers = ".".join(path[:-1]), join_words([format_value(one) for one in values])
    what = f"{section}.name" if chooser == "name" else chooser
    text = f"{'.'.join(path)} is {format_found(value)}, which only {what} {readers} uses, but {section}.{chooser} is"
    null = f" ({path[-1]}: null)" if isinstance(value, BaseModel | dict) else ""
    advice = f"remove it{null} or set {chooser}: {format_value(values[0])}"
    return Problem(path, f"{text} {format_value(found)}; {advice}", ((*path[:-1], chooser),))


def format_found(value: Any) -> str:
    """A value in a message; a section or mapping is just "set"."""
    return "set" if isinstance(value, BaseModel | dict) else format_value(value)


def parse_recipe(value: Mapping[str, Any]) -> tuple[Recipe | None, list[Problem]]:
    """The typed recipe and every mistake of type or name.

    With mistakes, the recipe is one in which the wrong values are replaced, so that rules that span several keys
    can still be checked on the rest; None when not even that is possible.
    """
    value = _drop_unread(value)
    try:
        return _validate(value), []
    except ValidationError as error:
        problems = _translate(error.errors(include_url=False), value)
    try:
        return _validate(_patch(value, [problem.path for problem in problems])), problems
    except ValidationError:
        return None, problems


def _drop_unread(value: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe without keys at their defaults that belong to another `kind`: recipes of old runs have all keys."""
    kept = dict(value)
    for name, field in ROOT.fields.items():
        kind, section = field_kind(field), value.get(name)
        if len(kind.sections) < 2 or not isinstance(section, dict):
            continue
        chosen = section.get("kind", kind.fields["kind"].default)
        kept[name] = {
            key: item
            for key, item in section.items()
            if key not in kind.fields
            or chosen in readers_of(kind.sections, key)
            or item != default_of(kind.fields[key])
        }
    return kept


def _validate(value: Mapping[str, Any]) -> Recipe:
    # Strict JSON is what a recipe file is: lists stand for tuples and text for whole-number keys, but "3" is not 3.
    return Recipe.model_validate_json(json.dumps(value), strict=True)


def _patch(value: Mapping[str, Any], wrong: Sequence[KeyPath]) -> dict[str, Any]:
    """A copy without the wrong values, and with an example for each required key that is then missing.

    A wrong item of a list takes the whole list with it.
    """
    patched = copy.deepcopy(dict(value))
    for path in wrong:
        section: Any = patched
        for depth, part in enumerate(path, 1):
            if depth == len(path) or not isinstance(section.get(part), dict):
                section.pop(part, None)
                break
            section = section[part]
    for key in walk():
        if key.field.is_required():
            section = patched
            # A section that is left out needs no keys; one that is required was put in before its own.
            for part in key.path[:-1]:
                section = section.get(part) if isinstance(section, dict) else None
            if isinstance(section, dict):
                section.setdefault(key.path[-1], {} if key.kind.fields else example_of(key.field))
    return patched


def _translate(errors: Sequence[ErrorDetails], value: Mapping[str, Any]) -> list[Problem]:
    found: dict[KeyPath, Problem] = {}
    meant: set[KeyPath] = set()
    located = [(_locate(error["loc"], value), error) for error in errors]
    for path, error in located:
        if len(found) >= MAX_EXPLAINED:
            found.setdefault(path, Problem(path, "this is wrong too"))
        elif error["type"] == "extra_forbidden":
            problem, key = _explain_extra(path, value)
            found.setdefault(path, problem)
            meant |= {key} if key else set()
        elif error["type"] == "too_short" and any(other[: len(path)] == path != other for other, _ in located):
            continue  # items that failed are not counted; they have their own messages
        elif error["type"] != "missing" or isinstance(_value_at(value, path), list):
            text = _explain_value(path, _value_at(value, path))
            if error["loc"][-1] == "[key]":
                text = f"{'.'.join(path[:-1])} has the key '{shorten(path[-1])}'"
                text = f"{text}; expected a whole number of at least 1, e.g. 9"
            found.setdefault(path, Problem(path, text))
    for path, error in located:
        # A misspelt key is one mistake, not also a missing one.
        if error["type"] == "missing" and path not in found and path not in meant:
            found[path] = Problem(path, _explain_missing(path))
    # Of a value with alternatives, the one that was meant is wrong further inside; the others need not be told.
    outer = {path[:length] for path in found for length in range(len(path))}
    return [problem for path, problem in found.items() if path not in outer]


def _locate(loc: Sequence[str | int], value: Any) -> KeyPath:
    """The part of pydantic's location that is a path in the recipe; it also names alternatives of unions."""
    path: KeyPath = ()
    kind: Kind | None = ROOT
    for part in map(str, loc):
        inner = kind.child(part) if kind else None
        if isinstance(value, dict) and (part in value or (inner is not None and kind is not None and kind.fields)):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            continue
        path, kind = (*path, part), inner
    return path


def _value_at(value: Any, path: KeyPath) -> Any:
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        else:
            value = value[int(part)] if isinstance(value, list) and int(part) < len(value) else None
    return value


def _explain_extra(path: KeyPath, value: Any) -> tuple[Problem, KeyPath | None]:
    """The problem of a key that its section does not have, and the key that was meant."""
    if path[-1] == "_base_":
        return Problem(path, "'_base_' stands inside a section; it is read at the top of a recipe only"), None
    if path[-1] == "_delete_":
        return Problem(path, "'_delete_' stands inside a list; lists are always replaced, remove it"), None
    parent = kind_at(path[:-1])
    if parent is not None and path[-1] in parent.fields:
        found = _value_at(value, (*path[:-1], "kind")) or parent.fields["kind"].default
        readers = readers_of(parent.sections, path[-1])
        return explain_reader(path, _value_at(value, path), "kind", found, readers), None
    text, key = explain_unknown(path)
    return Problem(path, text), key


def _explain_missing(path: KeyPath) -> str:
    field = field_at(path)
    text = f"{'.'.join(path[:-1]) or 'the recipe'} needs the key '{path[-1]}'"
    if field is None:
        return text
    example = example_of(field)
    sample = f"; e.g. {path[-1]}: {format_value(example)}" if example is not None else ""
    return f"{text}: {field.description}{sample}"


def _explain_value(path: KeyPath, value: Any) -> str:
    kind, field = kind_at(path) or ROOT, field_at(path)
    shown = f"'{quote(value)[1:-1]}'" if isinstance(value, str) else format_value(value)
    hint = _hint(kind, value)
    example = example_of(field) if field else None
    if not hint and example is not None and not kind.accepts(bool):
        hint = f"e.g. {path[-1]}: {format_value(example)}"
    return f"{'.'.join(path)} is {shorten(shown)}; expected {format_type(kind)}" + (f"; {hint}" if hint else "")


def _hint(kind: Kind, value: Any) -> str:
    """What to do about the usual slips."""
    if kind.accepts(bool) and isinstance(value, str) and value.lower() in _SWITCHES:
        return "write true or false, without quotes"
    if isinstance(value, dict | list) and not value:
        return "it is empty; give it content or remove the line"
    if kind.fields and value is None:
        return "the section is empty; indent its keys below it or remove the line"
    if kind.is_list and not isinstance(value, dict | list) and kind.item is not None:
        return f"write it as a list: [{format_value(value)}]"
    if kind.accepts(str) and isinstance(value, int | float):
        return f"put it in quotes: '{format_value(value)}'"
    if kind.accepts(int) and isinstance(value, float) and value == int(value):
        return f"write {int(value)}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 1 < value <= 100 and any(isinstance(item, Le | Lt) for item in kind.metadata):
        return f"for {format_value(value)} percent write {format_value(round(value / 100, 10))}"
    if isinstance(value, str) and any(kind.accepts(plain) for plain in (int, float)):
        with suppress(ValueError):
            float(value)
            return "write the number without quotes"
    return ""
