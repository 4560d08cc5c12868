"""The recipe of a plan as a file on top of the one that was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frameloom.config.load import BASE, DELETE, resolve
from frameloom.config.overrides import Override, apply_override, split_path
from frameloom.config.yaml_values import format_value, parse_value


def render_recipe(base: str, overrides: Sequence[str], settings: Mapping[str, Any]) -> str:
    """A file that gives `base` with the `overrides` of the command line, and with `settings` at dotted keys."""
    before, after = resolve(base), resolve(base, overrides)
    for dotted, value in settings.items():
        # As a file has it: there all keys are text.
        plain = parse_value(format_value(value), where=dotted)
        apply_override(after, Override(dotted, split_path(dotted), plain))
    lines = {BASE: str(Path(base).resolve()) if Path(base).is_file() else base, **_find_overlay(before, after)}
    return "".join(f"{key}: {format_value(value)}\n" for key, value in lines.items())


def _find_overlay(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What a file has to say for `before` to become `after`: sections of files are merged, all else is replaced."""
    if before.keys() - after.keys():
        return {DELETE: True, **after}
    return {
        key: _find_overlay(before[key], value) if _are_sections(before.get(key), value) else value
        for key, value in after.items()
        if key not in before or before[key] != value
    }


def _are_sections(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)
