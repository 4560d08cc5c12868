"""What a family's `weights.py` may offer beyond loading, reading a published config.json, and what pipelines are."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.json_objects import parse_object
from frameloom.core.log import get_logger
from frameloom.models.spec import DenoiserSpec, VAESpec

_log = get_logger(__name__)
_SHOWN = 6
PIPELINE_INDEX = "model_index.json"


def weights_module(family: DenoiserSpec | VAESpec) -> ModuleType:
    return sys.modules[family.load_original.__module__]


def read_pipeline_index(path: Path) -> dict[str, Any]:
    """What a diffusers pipeline says of its parts; empty for anything else."""
    return read_table(path / PIPELINE_INDEX)


def read_table(path: Path) -> dict[str, Any]:
    """A JSON object; empty for a file that is not there."""
    return parse_table(path.read_bytes(), where=str(path)) if path.is_file() else {}


def parse_table(text: str | bytes, *, where: str) -> dict[str, Any]:
    """A JSON object in a file or a note."""
    return parse_object(text, where=where, error=CheckpointError, fix="copy it again")


def find_config_reader(family: DenoiserSpec | VAESpec) -> Callable[[Mapping[str, Any]], Any] | None:
    """From a published config.json to the family's config; None if the family reads none.

    A `config_class.from_original` counts where it takes the published table, not some other form of it.
    """
    read = getattr(weights_module(family), "read_config", None)
    if read is None:
        read = getattr(family.config_class, "from_original", None)
        if read is not None and "values" not in inspect.signature(read).parameters:
            read = None
    return read


def warn_of_differences(
    family: DenoiserSpec | VAESpec, config: Any, published: Mapping[str, Any], *, key: str, path: str
) -> None:
    """Tell where the architecture of the recipe is not that of the config.json beside the weights.

    Weights that do not fit are refused anyway; but a setting such as the scale of positions leaves no trace in them.
    """
    read = find_config_reader(family)
    if read is None or not published:
        return
    try:
        theirs = read(published)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        _log.warning("%s: its config.json is not understood (%s); the recipe's %s is used", path, error, key)
        return
    different = [
        f"{field.name} {getattr(theirs, field.name)!r} there, {getattr(config, field.name)!r} here"
        for field in dataclasses.fields(config)
        if getattr(theirs, field.name) != getattr(config, field.name)
    ]
    if different:
        more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        _log.warning("%s: its config.json differs from %s: %s%s", path, key, "; ".join(different[:_SHOWN]), more)
