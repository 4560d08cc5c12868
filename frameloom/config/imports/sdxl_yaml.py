"""The SDXL trainer's yaml, also as documents print it, with `...` for what is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from frameloom.config.yaml_values import parse_document, read_text
from frameloom.core.errors import ConfigError

_PLACEHOLDER = re.compile(r"^\s*(?:- )?\.\.\.\s*$")
_EMPTY = re.compile(r"^(\s*[^#\n]*:)\s*\.\.\.\s*$")


def read_sdxl_yaml(path: Path) -> tuple[dict[str, Any], bool]:
    """(the values, whether something was left out); line numbers of mistakes are those of the file."""
    text = read_text(path, shown=str(path))
    lines = ["" if _PLACEHOLDER.match(line) else _EMPTY.sub(r"\1", line) for line in text.splitlines()]
    cleaned = "\n".join(lines)
    value, _ = parse_document(cleaned, where=str(path))
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: no configuration; expected keys such as model, optim and data")
    if "model" not in value and "params" in value:
        value = {"model": value}  # the inside of that section alone
    return value, lines != text.splitlines()
