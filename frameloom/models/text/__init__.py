"""Text encoders by name. An encoder's module is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from frameloom.models.names import refuse_unknown
from frameloom.models.text.base import TextEncoder, TextStates

__all__ = ["ENCODERS", "TextEncoder", "TextStates", "build_text_encoder"]

# name -> module with `build(max_length, path) -> TextEncoder`
ENCODERS: dict[str, str] = {"minilm": "frameloom.models.text.minilm"}


def build_text_encoder(name: str, *, max_length: int, path: str | Path | None = None) -> TextEncoder:
    """Load a frozen encoder. `path` is its folder; None takes the installed package that carries it."""
    refuse_unknown(name, ENCODERS, what="text encoder")
    build: Callable[[int, Path | None], TextEncoder] = import_module(ENCODERS[name]).build
    return build(max_length, Path(path) if path is not None else None)
