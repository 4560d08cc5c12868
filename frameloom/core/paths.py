"""Paths from files and command lines: kept inside a root, made into safe names, checked before they are written to."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

from frameloom.core.errors import ConfigError, DataError

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


def check_output_file(path: Path, option: str = "--out", *, suffix: str = "", source: Path | None = None) -> None:
    """ConfigError if a file cannot be written there, or if it would replace `source`.

    A source with the ending of the output may be replaced: that is how a manifest is scanned or checked again.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path}: a folder; name a file in it, such as {path / f'new{suffix}'}")
    if source is not None and source.suffix != suffix and path.exists() and source.exists() and path.samefile(source):
        raise ConfigError(f"{option} {path}: would replace what is read; choose another name")
    if suffix and path.suffix != suffix:
        raise ConfigError(f"{option} {path}: must end in {suffix}; write {path.with_suffix(suffix)}")
    check_output_folder(path.parent, option, file=path)


def check_output_folder(path: Path, option: str, *, file: Path | None = None) -> None:
    """ConfigError if there is no folder, for `file`, and none can be made below the nearest one that exists."""
    where, folder = f"{option} {file or path}", path.absolute()
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise ConfigError(f"{where}: {nearest} is no folder; choose another place")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{where}: {nearest} cannot be written to; give yourself the right, or choose another place")
