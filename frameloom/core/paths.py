"""Paths that come from files or people: kept inside their root, and cleaned when they become names."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from frameloom.core.errors import DataError

_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:")


def safe_join(root: Path, relative: str, *, where: str = "path") -> Path:
    """`root / relative`, refused when it is absolute, has a scheme, or leaves `root` (symbolic links followed)."""
    if not relative or "\0" in relative:
        raise DataError(f"{where}: the path {relative!r} is empty or has a null byte; name a file below {root}")
    if _SCHEME.match(relative):
        raise DataError(f"{where}: {relative!r} has a scheme; only plain paths below {root} are opened")
    if relative.startswith(("/", "\\")):
        raise DataError(f"{where}: {relative!r} is absolute; paths are relative to {root}")
    resolved_root = root.resolve()
    try:
        joined = (resolved_root / relative).resolve()
    except (OSError, RuntimeError) as error:  # a link that leads to itself, a name that is too long
        raise DataError(f"{where}: {relative!r} cannot be followed ({error}); check the path") from error
    if not joined.is_relative_to(resolved_root):
        raise DataError(f"{where}: {relative!r} leaves {root}; move the file below it or choose another root")
    return root / relative


def clean_name(text: str, *, max_bytes: int = 80) -> str:
    """A file name (no suffix) from any text: letters, digits, '-' and '_' only, never empty or reserved."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9_]+", "-", plain).strip("-_").lower()[:max_bytes].strip("-_")
    return f"{name or 'untitled'}_" if name in _RESERVED else name or "untitled"
