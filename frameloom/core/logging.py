"""Logging to standard error: coloured on a terminal, plain elsewhere, never with control characters."""

from __future__ import annotations

import logging
import re
import sys

# A caption or a file name in a message must not move the cursor of the terminal or recolour it.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _NoControl(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return CONTROL.sub("?", super().format(record))


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; call with `__name__`."""
    return logging.getLogger(name)


def set_up_logging(level: str = "info") -> None:
    """Send Frameloom's messages at `level` and above to standard error; safe to call again."""
    from rich.console import Console
    from rich.logging import RichHandler

    root = logging.getLogger("frameloom")
    root.handlers.clear()
    root.propagate = False
    root.setLevel(level.upper())
    console = Console(stderr=True)
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False, markup=False, highlighter=None)
        handler.setFormatter(_NoControl("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_NoControl("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root.addHandler(handler)
