"""A text encoder by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frameloom.models.registry import get_text_encoder
from frameloom.models.text.base import TextEncoder


def build_text_encoder(
    name: str, *, max_length: int, path: str | Path | None = None, options: Mapping[str, Any] | None = None
) -> TextEncoder:
    """A frozen encoder. `path` is its folder; None takes the installed package that carries it.

    `options` are fields of `TextOptions` that differ from the encoder's own.
    """
    folder = Path(path) if path is not None else None
    return get_text_encoder(name).build(name, max_length, folder, options or {})
