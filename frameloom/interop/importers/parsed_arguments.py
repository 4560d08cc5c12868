"""Values of an imported command or configuration, read by the names and kinds of its system's arguments.

Every name that is read is remembered, so that nothing that was given is left out in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from frameloom.config.loading.yaml_values import format_value, parse_scalar, shorten
from frameloom.interop.importers.arguments import Argument

_TRUE, _FALSE, _NONE = ("true", "1", "yes", "on", ""), ("false", "0", "no", "off"), ("none", "null")
_NUMBERS = ("integer", "number")
_EXPECTED = {
    "integer": "a whole number",
    "number": "a number",
    "switch": "True or False",
    "numbers": "numbers",
    "mapping": "a dictionary",
}


@dataclass
class ParsedArguments:
    """`values` are words of a command line (a tuple for each name) or plain values of a configuration; `name` is that
    of the launcher, where they are its options. `defaults` override the documented ones; `overruled` are names that
    another name for the same thing stood before."""

    arguments: Mapping[str, Argument]
    values: Mapping[str, Any]
    dashes: str = "--"
    name: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    overruled: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def find(self, name: str) -> str:
        """The name that is given of those for one thing: `name` or an alias of it; `name` where none is given."""
        names = (name, *self.arguments[name].aliases)
        self.used.update(names)
        written = [one for one in names if one in self.values]
        self.overruled.update(dict.fromkeys(written[1:], written[0] if written else name))
        return written[0] if written else name

    def has(self, name: str) -> bool:
        return self.find(name) in self.values

    def get(self, name: str, *, may_be_none: bool = False) -> Any:
        """The value of its argument's kind; the documented default where it is not given, None where there is none.

        A number with a default has a value: None is as wrong as a word, unless it `may_be_none`.
        """
        name = self.find(name)
        argument = self.arguments[name]
        if name not in self.values:
            return self.defaults.get(name, argument.default)
        try:
            value = _convert(self.values[name], argument.kind)
            if value is None and argument.default is not None and argument.kind in _NUMBERS and not may_be_none:
                raise ValueError
            return value
        except (ValueError, TypeError, OverflowError):
            expected = _EXPECTED.get(argument.kind, "a value")
            self.problems.append(f"{self.dashes}{name} is {self.written(name) or 'empty'!s}; expected {expected}")
            return argument.default

    def written(self, name: str) -> str:
        """The value as the user wrote it, near enough."""
        value = self.values.get(name)
        if isinstance(value, tuple) and all(isinstance(word, str) for word in value) and self.dashes:
            return shorten(" ".join(value))
        return shorten(format_value(value))

    def quote(self, name: str, verb: str = "") -> str:
        """The argument as it was written, for a comment or a message."""
        name = self.find(name) if name in self.arguments else name
        return " ".join(word for word in (f"{self.dashes}{name}", verb, self.written(name)) if word)


def _convert(value: Any, kind: str) -> Any:
    if kind in ("numbers", "texts"):
        return _convert_list(value, kind)
    if kind == "mapping":
        if not isinstance(value, Mapping):
            raise ValueError
        return value
    is_word = isinstance(value, tuple) and len(value) <= 1 and all(isinstance(word, str) for word in value)
    if kind == "any" and not is_word:
        return value
    if isinstance(value, tuple | list):
        if len(value) > 1 and kind != "text":
            raise ValueError
        value = " ".join(str(word) for word in value) if value else ""
    if value is None or (isinstance(value, str) and value.lower() in _NONE):
        return None
    if kind == "switch":
        word = str(value).lower()
        if word not in (*_TRUE, *_FALSE):
            raise ValueError
        return word in _TRUE
    if kind in _NUMBERS:
        number = float(value)
        if kind == "integer" and (isinstance(value, bool) or number != int(number)):
            raise ValueError
        return int(number) if kind == "integer" else number
    return parse_scalar(value) if kind == "any" and isinstance(value, str) else str(value)


def _convert_list(value: Any, kind: str) -> list[Any]:
    items = list(value) if isinstance(value, list | tuple) else [value]
    if len(items) == 1 and isinstance(items[0], str):
        items = items[0].strip("[]()").replace(",", " ").split() if kind == "numbers" else items
    if kind == "texts":
        return [str(item) for item in items]
    numbers = [float(item) for item in items]
    return [int(number) if isinstance(item, int) else number for item, number in zip(items, numbers, strict=True)]
