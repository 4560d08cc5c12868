"""Amounts of memory and durations, read from text and written for people. GB is 10^9 bytes and GiB is 2^30."""

from __future__ import annotations

import re

from frameloom.core.errors import ConfigError

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES = {"B": 1} | {name.upper(): size for name, size in (_DECIMAL | _BINARY).items()}


def parse_bytes(text: str, *, where: str, needs_unit: bool = True) -> int:
    """Bytes of `80GB`, `75 GiB` or `512mb`, above 0; without `needs_unit` a plain number counts bytes."""
    match = _AMOUNT.fullmatch(text.strip())
    unit = (_BYTES if needs_unit else _BYTES | {"": 1}).get(match[2].upper()) if match else None
    if match is None or unit is None or (num_bytes := int(float(match[1]) * unit)) < 1:
        raise ConfigError(
            f"{where} {text!r}: not an amount of memory; write a number above 0 and a unit, as in 500MB, 80GB or 75GiB"
        )
    return num_bytes


def format_bytes(num_bytes: float, *, binary: bool = False) -> str:
    """`80 GB`, `1.25 GB`, `60 MB`; with `binary` 74.5 GiB."""
    units = _BINARY if binary else _DECIMAL
    # A unit is used from a tenth of it on where it is binary, as the planner's columns have it.
    fitting = [name for name, size in units.items() if num_bytes >= (size / 10 if binary else size)]
    name = fitting[-1] if fitting else next(iter(units))
    return f"{num_bytes / units[name]:,.1f} {name}" if binary else f"{num_bytes / units[name]:,.4g} {name}"


def format_duration(seconds: float) -> str:
    """`1.53 s`, `3.2 min`, `5.1 h`."""
    if seconds < 120:
        return f"{seconds:,.3g} s"
    return f"{seconds / 3600:,.1f} h" if seconds >= 7200 else f"{seconds / 60:,.1f} min"
