"""Architectures are frozen dataclasses: their named sizes, what a recipe may override, and messages about both."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from frameloom.core.errors import ConfigError
from frameloom.core.spelling import refuse_unknown

__all__ = ["WIDTH_FIELDS", "choose_size", "field_types", "find_too_small", "fits_type", "override_fields"]

Config = TypeVar("Config")

# Fields of denoisers that follow from the autoencoder and the text encoders; no recipe sets them.
WIDTH_FIELDS = ("in_channels", "context_in_dim", "vec_in_dim")


def choose_size(
    sizes: Mapping[str, Config], size: str, *, family: str, derived: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Config:
    """A named size with the fields that follow from other parts of the recipe, and `overrides` of any other."""
    refuse_unknown(size, sizes, what=f"{family} size")
    fitted = dataclasses.replace(sizes[size], **derived)  # type: ignore[type-var]
    return override_fields(fitted, overrides, where="model.overrides", derived=derived)


def find_too_small(config: object, least: Mapping[str, float], *, where: str) -> list[str]:
    """A message for each field of `config` that is below its `least` value."""
    return [
        f"{where}: {name} is {getattr(config, name)}; it must be at least {smallest}"
        for name, smallest in least.items()
        if getattr(config, name) < smallest
    ]


def override_fields(
    config: Config, overrides: Mapping[str, Any], *, where: str, derived: Collection[str] = ()
) -> Config:
    """A copy of a config dataclass with some fields replaced; `derived` ones follow from other parts of the recipe."""
    types = field_types(config, without=derived)
    for name, value in overrides.items():
        if name in derived:
            raise ConfigError(f"{where}: '{name}' follows from the autoencoder and the text encoders; remove it")
        refuse_unknown(name, types, what=where)
        if not fits_type(value, types[name]):
            raise ConfigError(f"{where}: '{name}' is {value!r}; it should be like {getattr(config, name)!r}")
    return dataclasses.replace(config, **overrides)  # type: ignore[type-var]


def field_types(config: object, *, without: Collection[str] = ()) -> dict[str, type]:
    """The type of each field's value, in the order of the class."""
    names = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    return {name: type(getattr(config, name)) for name in names if name not in without}


def fits_type(value: object, kind: type) -> bool:
    """Whether a recipe may give `value` to a field of this type: whole numbers for any, lists for tuples."""
    allowed = {float: (int, float), tuple: (list, tuple)}.get(kind, (kind,))
    # bool is an int to Python, but `depth: true` is a mistake.
    return isinstance(value, allowed) and isinstance(value, bool) == (kind is bool)
