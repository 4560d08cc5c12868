"""Objects by their name, so that a table of strings can list them without importing any."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load_object(target: str) -> Any:
    """What `target`, "package.module:name", names; its module is imported if it was not yet."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ValueError(f"'{target}' names no object; write it as package.module:name")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and something that it imports does not
        raise ImportError(f"'{target}': there is no module '{error.name}'") from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise ImportError(f"'{target}': the module has no '{name}'") from error
