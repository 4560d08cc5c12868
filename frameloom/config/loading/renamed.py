"""Keys of a recipe that have another name today. The old ones are read for one release, with a warning."""

from __future__ import annotations

from typing import Any

from frameloom.config.loading.schema_tree import RENAMED, default_of, field_at
from frameloom.config.loading.yaml_values import KeyPath
from frameloom.core.errors import ConfigError
from frameloom.core.logging import get_logger

_log = get_logger(__name__)

_PATHS = [(tuple(old.split(".")), tuple(new.split("."))) for old, new in RENAMED.items()]


def rename_path(path: KeyPath) -> KeyPath:
    """The path of a key, or of one inside it, under its name of today."""
    return next(((*new, *path[len(old) :]) for old, new in _PATHS if path[: len(old)] == old), path)


def rename_keys(value: Any, locations: dict[KeyPath, str], *, name: str, below: KeyPath = ()) -> None:
    """Give the keys in the plain recipe `value`, or its part at `below`, their names of today; `locations` follow.

    A key at its default is renamed without a word: recipes that are kept with runs have every key.
    """
    for old, new in _PATHS:
        section = value if old[: len(below)] == below and len(old) > len(below) else None
        for part in old[len(below) : -1]:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or old[-1] not in section:
            continue
        location, names = locations.get(old, name), (".".join(old), ".".join(new))
        if new[-1] in section:
            raise ConfigError(
                f"{location}: {names[0]} is the old name of {names[1]}, which is set too; remove the old one"
            )
        section[new[-1]] = section.pop(old[-1])
        for path in [path for path in locations if path[: len(old)] == old]:
            locations[rename_path(path)] = locations.pop(path)
        warn_of_old_name(old, section[new[-1]], location)


def warn_of_old_name(old: KeyPath, value: Any, location: str) -> None:
    new = rename_path(old)
    field = field_at(new)
    if new != old and (field is None or value != default_of(field)):
        _log.warning(
            "%s: %s is called %s now; this release still reads the old name", location, ".".join(old), ".".join(new)
        )
