"""The recipe that an import builds: values, a comment for what changed, and what found no place."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from frameloom.config.loading.schema_tree import kind_at
from frameloom.config.loading.yaml_values import KeyPath, format_key, format_value
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.section import Section

_RUNNING = ("run", "seed", "parallel", "validation", "lora")
_WIDTH = 118
_MOST_IN_LINE = 90


@dataclass
class Draft:
    """`head` are lines of the head comment; `left` says what found no place, `unused` what the original ignores."""

    values: dict[str, Any]
    head: list[str] = field(default_factory=list)
    notes: dict[KeyPath, list[str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, template: Mapping[str, Any]) -> Draft:
        """What a shipped recipe knows of a model and its data; how it is run is the command's own."""
        return cls({key: copy.deepcopy(value) for key, value in template.items() if key not in _RUNNING})

    def set(self, dotted: str, value: Any, note: str = "") -> None:
        """Set one key; `note` becomes a comment above it."""
        *sections, last = self._path(dotted)
        target: Any = self.values
        for key in sections:
            target = self._step(target, key)
        if isinstance(target, list):
            target[int(last)] = value
        else:
            target[last] = value
        if note:
            self.note(dotted, note)

    def get(self, dotted: str) -> Any:
        value: Any = self.values
        for key in self._path(dotted):
            if isinstance(value, list) and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, dict) and key in value:
                value = value[key]
            else:
                return None
        return value

    def drop(self, dotted: str) -> None:
        *sections, last = self._path(dotted)
        target = self.get(".".join(sections)) if sections else self.values
        if isinstance(target, dict):
            target.pop(last, None)

    def note(self, dotted: str, text: str) -> None:
        path = self._path(dotted)
        # Lists are printed item by item, so a comment on something inside stands above the list.
        place = next((depth for depth, key in enumerate(path) if key.isdecimal()), len(path))
        self.notes.setdefault(path[:place], []).append(text)

    def _path(self, dotted: str) -> KeyPath:
        path = tuple(dotted.split("."))
        if kind_at(path) is None:
            raise KeyError(f"an import sets {dotted}, which no recipe has")
        return path

    def _step(self, target: Any, key: str) -> Any:
        if isinstance(target, list):
            return target[int(key)]
        if not isinstance(target.get(key), dict | list):
            target[key] = {}
        return target[key]


def render_draft(draft: Draft) -> str:
    """The recipe as YAML; reading it back gives the values of the draft."""
    lines = [line for text in draft.head for line in _comment(text, "")]
    lines += _render_section(Recipe, draft.values, (), draft.notes)
    for title, texts in (("Without a key here:", draft.left), ("Without effect in the original:", draft.unused)):
        if texts:
            lines += ["", f"# {title}"]
            lines += [line for text in texts for line in _comment(text, "", bullet="- ")]
    return "\n".join(lines) + "\n"


def _render_section(
    section: type[Section] | None, values: Mapping[str, Any], path: KeyPath, notes: Mapping[KeyPath, list[str]]
) -> Iterator[str]:
    indent = "  " * len(path)
    order = list(section.model_fields) if section else []
    names = sorted(values, key=lambda name: order.index(name) if name in order else -1) if order else list(values)
    for name in names:
        value, here = values[name], (*path, name)
        for text in notes.get(here, ()):
            yield from _comment(text, indent)
        key = f"{indent}{format_key(name)}:"
        kind = kind_at(here)
        has_notes = any(place[: len(here)] == here != place for place in notes)
        line = f"{key} {format_value(value)}"
        if isinstance(value, dict) and value and (has_notes or len(line) > _MOST_IN_LINE or len(here) == 1):
            yield key
            yield from _render_section(kind.section if kind else None, value, here, notes)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield key
            yield from (f"{indent}  - {format_value(item)}" for item in value)
        else:
            yield line


def _comment(text: str, indent: str, *, bullet: str = "") -> list[str]:
    lead = f"{indent}# {bullet}"
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=lead,
        subsequent_indent=f"{indent}# " + " " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
