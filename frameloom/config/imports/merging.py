"""Dictionaries of configurations laid over each other, and taken apart into dotted names."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping
from typing import Any


def merge_over(target: dict[str, Any], value: Mapping[str, Any]) -> None:
    """Merge `value` into `target` as mmengine does: dictionaries deeply, unless `_delete_` is true inside."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            inner = {name: part for name, part in item.items() if name != "_delete_"}
            if item.get("_delete_") or not isinstance(target.get(key), dict):
                target[key] = {}
            merge_over(target[key], inner)
        else:
            target[key] = copy.deepcopy(item)


def flatten(value: Mapping[str, Any], whole: Container[str], prefix: str = "") -> dict[str, Any]:
    """Values by dotted names; a dictionary whose name is in `whole` stays one."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and name not in whole:
            flat.update(flatten(item, whole, f"{name}."))
        else:
            flat[name] = item
    return flat
