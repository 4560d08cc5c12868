"""Overrides from the command line: `--optim.lr 1e-5`, `--data.buckets.256px.1 '[1.0, 45]'`, `--train.ema null`."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frameloom.config.loading.renamed import rename_keys, rename_path, warn_of_old_name
from frameloom.config.loading.schema_tree import ROOT, Kind, default_of, explain_unknown, field_at, format_type, kind_at
from frameloom.config.loading.yaml_values import KeyPath, format_value, parse_value
from frameloom.core.errors import ConfigError

DELETE = "_delete_"
# A part in quotes may hold dots: data.buckets."256px_ar2.39:1".1
_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^."']+))\s*(?:\.|$)""")


@dataclass(frozen=True)
class Override:
    """One key to set; `flag` is how the person wrote it."""

    flag: str
    path: KeyPath
    value: Any


def parse_overrides(arguments: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Read `--key value` and `--key=value`: the good ones, and a message for each bad one."""
    overrides: list[Override] = []
    problems: list[str] = []
    rest = list(arguments)
    while rest:
        try:
            overrides.append(_take_override(rest))
        except ConfigError as error:
            problems.extend(error.problems)
    return overrides, problems


def _take_override(rest: list[str]) -> Override:
    """Remove one flag and its value from the front of `rest`."""
    word = rest.pop(0)
    if not word.startswith("--") or len(word) < 3:
        raise ConfigError(f"{word}: not an override; write --key value, e.g. --optim.lr 1e-5")
    flag, equals, after = word.partition("=")
    text: str | None = after if equals else None
    # A number may be negative, so a single dash still is a value; the next flag is not.
    if not equals and rest and not rest[0].startswith("--"):
        text = rest.pop(0)
    written = _split(flag)
    kind = _resolve(rename_path(written), flag)
    if text is None:
        raise ConfigError(f"{flag}: a value is missing, expected {format_type(kind)}; write {flag} VALUE")
    value = _read_value(text, kind, flag)
    warn_of_old_name(written, value, flag)
    rename_keys(value, {}, name=flag, below=written)
    return Override(flag, rename_path(written), value)


def split_path(flag: str) -> KeyPath:
    """`--optim.lr` as a path, under the key's name of today; refused when a part is empty."""
    return rename_path(_split(flag))


def _split(flag: str) -> KeyPath:
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


def _resolve(path: KeyPath, flag: str) -> Kind:
    """The type of the key that a flag names; refused, with the nearest key, when there is none."""
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
        key = f".{path[-1]}" if parent.item and path[-1] in parent.item.fields else ""
        return f"{owner} is a list, and '{path[-1]}' is not a place in it; did you mean {owner}.0{key}?"
    if not parent.fields:
        return f"{owner} has no keys inside; it takes {format_type(parent)}"
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
    is_group = kind.item is not None and text[:1] == ("[" if kind.is_list else "{")
    if not only_text or is_group or text[:1] in ('"', "'"):
        return parse_value(text, where=flag)
    return None if kind.accepts(type(None)) and text in ("null", "~", "") else text


def apply_override(value: dict[str, Any], override: Override) -> None:
    """Set one key in a plain recipe, making the sections and default lists on the way."""
    target: Any = value
    new = override.value
    if isinstance(new, dict) and new.get(DELETE) is True:
        # A mapping on the command line replaces the old one in any case.
        new = {key: item for key, item in new.items() if key != DELETE}
    for depth, key in enumerate(override.path):
        path, is_last = override.path[: depth + 1], depth + 1 == len(override.path)
        if isinstance(target, list):
            owner = ".".join(path[:-1])
            if not key.isdecimal() or int(key) >= len(target):
                raise ConfigError(
                    f"{override.flag}: {owner} has {len(target)} item(s), counted from 0, and no item {key}; "
                    f"to make it longer give the whole list: --{owner} '[...]'"
                )
            place: Any = int(key)
        else:
            place = key
            if not is_last and target.get(key) is None:
                field, kind = field_at(path), kind_at(path)
                # What a key inside an absent or null value changes: the default list, or an empty section.
                has_default = field is not None and not field.is_required() and kind is not None and kind.is_list
                target[key] = copy.deepcopy(default_of(field)) if field and has_default and key not in target else {}
        if is_last:
            target[place] = new
        elif not isinstance(target[place], dict | list):
            found = format_value(target[place])
            raise ConfigError(f"{override.flag}: {'.'.join(path)} is {found}, which has no keys inside")
        else:
            target = target[place]
