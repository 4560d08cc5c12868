"""Recipes and their schema as text: commented YAML, the reference page, the JSON schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from frameloom.config.loading.schema_tree import RENAMED, ROOT, Kind, default_of, field_kind, format_type
from frameloom.config.loading.yaml_values import format_key, format_value
from frameloom.config.schema.recipe import Recipe

_COMMENT_COLUMN = 32
_LINE_WIDTH = 120


def render_yaml(recipe: Recipe) -> str:
    """The whole recipe, defaults included, each key with its meaning; reading it back gives an equal recipe."""
    return "\n".join(_render_section(ROOT, recipe.model_dump(mode="json"), 0)).lstrip("\n") + "\n"


def _render_section(section: Kind, value: Mapping[str, Any], indent: int) -> Iterator[str]:
    space = " " * indent
    for name, field in section.fields.items():
        if name not in value:  # a key of another kind
            continue
        kind, item = field_kind(field), value[name]
        meaning = field.description or ""
        if isinstance(item, dict) and item:
            if not indent:
                yield ""
            yield _comment(f"{space}{name}:", meaning)
            yield from _render_inside(kind, item, indent + 2)
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            yield _comment(f"{space}{name}:", meaning)
            for entry in item:
                yield from _render_entry(kind, entry, indent + 2)
        else:
            yield _comment(f"{space}{name}: {format_value(item)}", meaning)


def _render_inside(kind: Kind, value: Mapping[str, Any], indent: int) -> Iterator[str]:
    """A section goes on with comments; a mapping of the person's own is printed as it is."""
    if kind.fields:
        yield from _render_section(kind, value, indent)
        return
    for key, item in value.items():
        if isinstance(item, dict) and item and kind.item is not None:
            yield f"{' ' * indent}{format_key(key)}:"
            yield from _render_inside(kind.item, item, indent + 2)
        else:
            yield f"{' ' * indent}{format_key(key)}: {format_value(item)}"


def _render_entry(kind: Kind, entry: Mapping[str, Any], indent: int) -> Iterator[str]:
    """One section of a list: the first line carries the dash."""
    assert kind.item is not None
    for number, line in enumerate(_render_section(kind.item, entry, indent + 2)):
        yield line if number else f"{' ' * indent}- {line.lstrip()}"


def _comment(line: str, meaning: str) -> str:
    """The line with its meaning behind it, or above it where that would be too long."""
    aligned = f"{line:<{_COMMENT_COLUMN}}  # {meaning}" if meaning else line
    indent = line[: len(line) - len(line.lstrip())]
    return aligned if len(aligned) <= _LINE_WIDTH or not meaning else f"{indent}# {meaning}\n{line}"


_INTRODUCTION = """\
# The recipe

A run is one YAML file. `frameloom recipe check FILE` says all that is wrong with it, `frameloom recipe show FILE`
prints it with every default filled in, and `frameloom recipe list` shows the recipes that come with the package. This
page is printed by `frameloom recipe reference`; the types and defaults come from the program itself.

**Inheritance.** `_base_: shapes/demo-vae` starts from another recipe: a path relative to this file, or the name of a
shipped one; a list is merged in order. Sections and mappings merge key by key, everything else (lists too) is replaced.
`_delete_: true` inside a section or mapping throws away what was inherited there.

**Command line.** Any key can be given with dots: `--optim.lr 1e-5`, `--data.buckets.256px.1 '[1.0, 45]'`,
`--text.encoders.0.max_length 32`, `--train.ema null`. Values are written as in the file. A part with a dot in it goes
in quotes: `--data.buckets.'"256px_ar2.39:1"'.1 '[1.0, 4]'`. The command line wins over the file, and the file over its
bases.

**Values.** Numbers may be written `1e-5` or `10_000`; switches are `true` and `false` (`yes` and `on` are text, and
refused); `null` means none. An amount of memory has a unit: `80GB` is 80 * 10^9 bytes, `80GiB` 80 * 2^30.
Tags (`!!...`) are refused: a recipe holds data, never code. Relative paths start from the folder in which the command
runs.
"""


def render_reference() -> str:
    """The recipe reference in Markdown: a table of keys for each section."""
    renamed = [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    title = "## Renamed keys\n\nThis release reads the old names too, with a warning.\n"
    parts = [_INTRODUCTION, _render_tables(ROOT, "", ""), title, "| old name | name |", "|---|---|", *renamed]
    return "\n".join(parts) + "\n"


def _render_tables(section: Kind, prefix: str, meaning: str) -> str:
    title = f"## `{prefix}`\n\n{meaning[:1].upper()}{meaning[1:].rstrip('.')}.\n" if prefix else "## Top level\n"
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    below: list[str] = []
    for name, field in section.fields.items():
        kind = field_kind(field)
        inner = kind if kind.fields else kind.item
        text = format_type(kind)
        if inner is not None and inner.fields:
            dotted = f"{prefix}.{name}" if prefix else name
            below.append(_render_tables(inner, dotted if kind.fields else f"{dotted}.N", field.description or ""))
            text = "section" if kind.fields else "list of sections"
            text = f"true, false or {text}" if kind.accepts(bool) else text
            text = f"{text} or null" if kind.accepts(type(None)) else text
        default = None if field.is_required() else default_of(field)
        shown = "see below" if kind.fields and isinstance(default, dict) else f"`{format_value(default)}`"
        cells = (text, "required" if field.is_required() else shown, field.description or "")
        escaped = [cell.replace("|", "\\|").replace("<", "\\<") for cell in cells]
        rows.append(f"| `{name}` | {' | '.join(escaped)} |")
    return "\n".join([title, *rows, "", *below])


def json_schema() -> dict[str, Any]:
    """What a recipe file may hold, as JSON schema. No key is required in it: any may come from a `_base_`."""
    schema = Recipe.model_json_schema()
    for section in [schema, *schema.get("$defs", {}).values()]:
        section.pop("required", None)
        for key in section.get("properties", {}).values():
            if "oneOf" in key:  # a section of several kinds may leave its kind to a _base_
                key["anyOf"] = key.pop("oneOf")
        if section.get("type") == "object":
            flag = {"type": "boolean", "description": "true: forget what a _base_ gave for this section"}
            section["properties"] = {**section.get("properties", {}), "_delete_": flag}
    names: Sequence[dict[str, Any]] = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
    schema["properties"]["_base_"] = {"anyOf": names, "description": "recipes to start from, merged in order"}
    schema["title"] = "Frameloom recipe"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
