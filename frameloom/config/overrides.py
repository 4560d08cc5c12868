"""Overrides from the command line: `--optim.lr 1e-5`, `--data.buckets.256px.1 '[1.0, 45]'`, `--train.ema null`."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frameloom.config.tree import ROOT, Kind, default_of, describe, explain_unknown, field_at, kind_at
from frameloom.config.yaml_values import KeyPath, format_value, parse_value
from frameloom.core.errors import ConfigError

# A part in quotes may hold dots: data.buckets."256px_ar2.39:1".1
_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^."']+))\s*(?:\.|$)""")


@dataclass(frozen=True)
class Override:
    """One key to set; `flag` is how the person wrote it."""

    flag: str
    path: KeyPath
    value: Any


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Read `--key value` and `--key=value`; all mistakes are gathered into one error."""
    overrides: list[Override] = []
    problems: list[str] = []
    rest = list(arguments)
    while rest:
        try:
            overrides.append(_take_override(rest))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return overrides


def _take_override(rest: list[str]) -> Override:
    """Remove one flag and its value from the front of `rest`."""
    word = rest.pop(0)
    if not word.startswith("--") or len(word) < 3:
        raise ConfigError(f"{word}: not an override; write --key value, e.g. --optim.lr 1e-5")
    flag, equals, text = word.partition("=")
    kind = resolve_flag(flag)
    if not equals:
        # A number may be negative, so a single dash still is a value; the next flag is not.
        if not rest or rest[0].startswith("--"):
            raise ConfigError(f"{flag}: a value is missing, expected {describe(kind)}; write {flag} VALUE")
        text = rest.pop(0)
    return Override(flag, split_path(flag), _read_value(text, kind, flag))


def split_path(flag: str) -> KeyPath:
    """`--optim.lr` as a path; refused when a part is empty."""
    dotted, parts, position = flag.removeprefix("--"), [], 0
    while position < len(dotted):
        match = _PART.match(dotted, position)
        if match is None:
            raise ConfigError(f"{flag}: the key is not written as parts with dots between; e.g. --optim.lr")
        parts.append(next(part for part in match.groups() if part is not None))
        position = match.end()
    if not parts or dotted.endswith("."):
        raise ConfigError(f"{flag}: the key ends with a dot; e.g. --optim.lr")
    return tuple(parts)


def resolve_flag(flag: str) -> Kind:
    """The type of the key that a flag names; refused, with the nearest key, when there is none."""
    path = split_path(flag)
    kind = ROOT
    for depth, key in enumerate(path):
        child = kind.child(key)
        if child is None:
            raise ConfigError(f"{flag}: {_explain(path[: depth + 1], path[depth + 1 :], kind)}")
        kind = child
    return kind


def _explain(path: KeyPath, rest: KeyPath, parent: Kind) -> str:
    owner = ".".join(path[:-1])
    if parent.is_list:
        inner = parent.item.section if parent.item else None
        key = f".{path[-1]}" if inner and path[-1] in inner.model_fields else ""
        return f"{owner} is a list, and '{path[-1]}' is not a place in it; did you mean {owner}.0{key}?"
    if parent.section is None:
        return f"{owner} has no keys inside; it takes {describe(parent)}"
    text, meant = explain_unknown(path)
    if meant is None or meant[-1] == path[-1]:
        return text
    # On a command line the whole dotted key is what the person types again.
    whole = (*meant, *rest) if kind_at((*meant, *rest)) else meant
    return text.partition("; ")[0] + f"; did you mean {'.'.join(whole)}?"


def _read_value(text: str, kind: Kind, flag: str) -> Any:
    """The value behind a flag; where only text can stand, `123` and `a: b` are text without extra quotes."""
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise ConfigError(f"{flag}: the value {text!r} is not UTF-8 text")
    only_text = kind.accepts(str) and not any(kind.accepts(plain) for plain in (int, float, bool))
    if not only_text or text[:1] in ('"', "'"):
        return parse_value(text, where=flag)
    return None if kind.accepts(type(None)) and text in ("null", "~", "") else text


def apply_override(value: dict[str, Any], override: Override) -> None:
    """Set one key in a plain recipe, making the sections and default lists on the way."""
    target: Any = value
    for depth, key in enumerate(override.path[:-1]):
        target = _step_into(target, key, override.path[: depth + 1], override)
    last = override.path[-1]
    if isinstance(target, list):
        target[_check_index(target, last, override)] = override.value
    else:
        target[last] = override.value


def _step_into(target: Any, key: str, path: KeyPath, override: Override) -> Any:
    if isinstance(target, list):
        index = _check_index(target, key, override)
        inner = target[index]
    else:
        inner = target.get(key)
        if not isinstance(inner, dict | list):
            field = field_at(path)
            kind = kind_at(path)
            keeps_default = kind is not None and kind.is_list and key not in target and field is not None
            inner = copy.deepcopy(default_of(field)) if keeps_default and field is not None else {}
            target[key] = inner
    if not isinstance(inner, dict | list):
        raise ConfigError(f"{override.flag}: {'.'.join(path)} is {format_value(inner)}, it has no keys inside")
    return inner


def _check_index(target: list[Any], key: str, override: Override) -> int:
    if not key.isdecimal() or int(key) >= len(target):
        where = ".".join(override.path[: override.path.index(key)])
        raise ConfigError(
            f"{override.flag}: {where} has {len(target)} items, counted from 0, and no item {key}; "
            f"give the whole list: --{where} '[...]'"
        )
    return int(key)
