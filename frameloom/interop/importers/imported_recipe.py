"""The recipe that an import writes: its values, and comments on what was changed, ignored or is not supported."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from frameloom.config.loading.recipe import resolve
from frameloom.config.loading.schema_tree import kind_at
from frameloom.config.loading.yaml_values import KeyPath, format_key, format_value

# What the command says itself; a shipped recipe only knows a model and its data.
_RUNNING = ("run", "seed", "parallel", "validation", "lora")
_WIDTH = 118
_MOST_IN_LINE = 90


@dataclass
class ImportedRecipe:
    """`head` are lines of the head comment; `unsupported` is what has no key here, `unused` what the original ignores.

    `notes` are comments above keys.
    """

    values: dict[str, Any]
    head: list[str] = field(default_factory=list)
    notes: dict[KeyPath, list[str]] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def start(self, template: Mapping[str, Any], *cleared: str) -> None:
        """Begin with what a shipped recipe knows of a model and its data, without the sections that are `cleared`."""
        self.values = {key: copy.deepcopy(value) for key, value in template.items() if key not in _RUNNING}
        self.values |= {section: {} for section in cleared}

    def set(self, dotted: str, value: Any, note: str = "") -> None:
        """Set one key; `note` becomes a comment above it."""
        *sections, last = _split(dotted)
        target: Any = self.values
        for key in sections:
            if isinstance(target, list):
                target = target[int(key)]
                continue
            if not isinstance(target.get(key), dict | list):
                target[key] = {}
            target = target[key]
        target[int(last) if isinstance(target, list) else last] = value
        if note:
            self.note(dotted, note)

    def get(self, dotted: str) -> Any:
        value: Any = self.values
        for key in _split(dotted):
            if isinstance(value, list) and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, dict) and key in value:
                value = value[key]
            else:
                return None
        return value

    def drop(self, dotted: str) -> None:
        *sections, last = _split(dotted)
        target = self.get(".".join(sections)) if sections else self.values
        if isinstance(target, dict):
            target.pop(last, None)

    def note(self, dotted: str, text: str) -> None:
        path = _split(dotted)
        # Lists are printed item by item, so a comment on something inside stands above the list.
        depth = next((depth for depth, key in enumerate(path) if key.isdecimal()), len(path))
        self.notes.setdefault(path[:depth], []).append(text)

    @property
    def encoders(self) -> list[dict[str, Any]]:
        """The text encoders, also where they are those of the shipped recipe that this one is based on."""
        found: list[dict[str, Any]] = self.get("text.encoders") or resolve(self.values["_base_"])["text"]["encoders"]
        return found

    def render(self) -> str:
        """The recipe as YAML; reading it back gives these values."""
        lines = [line for text in self.head for line in _comment(text, "")]
        lines += self._render_section(self.values, ())
        for title, texts in (
            ("Without a key here:", self.unsupported),
            ("Without effect in the original:", self.unused),
        ):
            if texts:
                lines += ["", f"# {title}"]
                lines += [line for text in texts for line in _comment(text, "", bullet="- ")]
        return "\n".join(lines) + "\n"

    def _render_section(self, values: Mapping[str, Any], path: KeyPath) -> Iterator[str]:
        indent = "  " * len(path)
        section = kind_at(path)
        order = list(section.fields) if section else []
        names = sorted(values, key=lambda name: order.index(name) if name in order else -1) if order else list(values)
        for name in names:
            value, here = values[name], (*path, name)
            for text in self.notes.get(here, ()):
                yield from _comment(text, indent)
            key = f"{indent}{format_key(name)}:"
            has_notes = any(noted[: len(here)] == here != noted for noted in self.notes)
            line = f"{key} {format_value(value)}"
            if isinstance(value, dict) and value and (has_notes or len(line) > _MOST_IN_LINE or len(here) == 1):
                yield key
                yield from self._render_section(value, here)
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                yield key
                yield from (f"{indent}  - {format_value(item)}" for item in value)
            else:
                yield line


def _split(dotted: str) -> KeyPath:
    path = tuple(dotted.split("."))
    if kind_at(path) is None:
        raise KeyError(f"an import sets {dotted}, which no recipe has")
    return path


def _comment(text: str, indent: str, *, bullet: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{indent}# {bullet}",
        subsequent_indent=f"{indent}# " + " " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
