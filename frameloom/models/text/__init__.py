"""Text encoders by name. An encoder's module is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from frameloom.models.names import refuse_unknown
from frameloom.models.text.base import TextEncoder, TextOptions, TextStates

__all__ = ["ENCODERS", "TextEncoder", "TextOptions", "TextStates", "build_text_encoder"]

# name -> module with `build(name, max_length, path, options) -> TextEncoder`
ENCODERS: dict[str, str] = {
    "minilm": "frameloom.models.text.minilm",
    "t5": "frameloom.models.text.t5",
    "mt5": "frameloom.models.text.t5",
    "clip_l": "frameloom.models.text.clip",
    "clip_bigg": "frameloom.models.text.clip",
}


def build_text_encoder(
    name: str, *, max_length: int, path: str | Path | None = None, options: Mapping[str, Any] | None = None
) -> TextEncoder:
    """A frozen encoder. `path` is its folder; None takes the installed package that carries it.

    `options` are fields of `TextOptions` that differ from the encoder's own.
    """
    refuse_unknown(name, ENCODERS, what="text encoder")
    build: Callable[[str, int, Path | None, Mapping[str, Any]], TextEncoder] = import_module(ENCODERS[name]).build
    return build(name, max_length, Path(path) if path is not None else None, options or {})
