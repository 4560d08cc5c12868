"""Places that a command is told to write to, checked before it works for hours."""

from __future__ import annotations

import os
from pathlib import Path

from frameloom.core.errors import ConfigError


def check_output_file(path: Path, option: str = "--out", *, suffix: str = "", source: Path | None = None) -> None:
    """ConfigError if a file cannot be written there, or if it would replace `source`.

    A source with the ending of the output may be replaced: that is how a manifest is scanned or checked again.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path}: a folder; name a file in it, such as {path / f'new{suffix}'}")
    if source is not None and source.suffix != suffix and _is_same(path, source):
        raise ConfigError(f"{option} {path}: would replace what is read; choose another name")
    if suffix and path.suffix != suffix:
        raise ConfigError(f"{option} {path}: must end in {suffix}; write {path.with_suffix(suffix)}")
    _check_folder(path.parent, f"{option} {path}")


def check_output_folder(path: Path, option: str) -> None:
    """ConfigError if there is no folder and none can be made."""
    _check_folder(path, f"{option} {path}")


def _check_folder(folder: Path, where: str) -> None:
    """Files go to the nearest place above that exists, or to folders that are made there."""
    folder = folder.absolute()
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise ConfigError(f"{where}: {nearest} is no folder; choose another place")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{where}: {nearest} cannot be written to; give yourself the right, or choose another place")


def _is_same(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)
