"""Gradio takes orders from environment variables: where to listen, what to share, what to serve. None reach it here."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from frameloom.core.errors import MissingExtra

_PREFIXES = ("GRADIO_", "OAUTH_", "SPACE_", "OPENID_")
_NAMES = ("SYSTEM", "KAGGLE_KERNEL_RUN_TYPE")


def clean_environment(scratch: Path, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Remove every variable that Gradio reads and set our own; gives the names of those that are not honoured."""
    ignored = sorted(name for name in environment if name.startswith(_PREFIXES) or name in _NAMES)
    for name in ignored:
        del environment[name]
    environment["GRADIO_ANALYTICS_ENABLED"] = "False"
    environment["GRADIO_TEMP_DIR"] = str(scratch)
    environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
    return ignored


def import_gradio(scratch: Path) -> Any:
    """Gradio with a clean environment; MissingExtra names the extra that brings it."""
    clean_environment(scratch)
    try:
        import gradio
    except ModuleNotFoundError as error:
        raise MissingExtra("gradio", "studio") from error
    return gradio
