"""Shared context of the tabs: root folder, limits, path checks, error reporting."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from html import escape
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote

import gradio as gr
from gradio.context import Context

from frameloom.core.errors import DataError, FrameloomError
from frameloom.core.paths import safe_join

FILES_ROUTE = "/files/"
# What the page may fetch from below the root; everything else there is only read by the server.
SERVED_SUFFIXES = frozenset({".mp4", ".webm", ".gif", ".png", ".jpg", ".jpeg", ".webp", ".html", ".mov", ".mkv"})
_MAX_DEPTH = 8
_MAX_ENTRIES = 50_000


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for, whoever sends it."""

    body_bytes: int = 1 << 20
    upload_bytes: int = 64 << 20
    upload_files: int = 4
    open_requests: int = 64
    waiting_events: int = 32
    prompt_chars: int = 4_000
    text_chars: int = 200_000
    frames: int = 1_025
    side_px: int = 2_048
    steps: int = 500


@dataclass(frozen=True)
class StudioContext:
    """The root is resolved once; `scratch` is private to this server and removed with it."""

    root: Path
    scratch: Path
    limits: Limits = field(default_factory=Limits)
    _closers: list[Callable[[], None]] = field(default_factory=list)
    routes: list[Callable[[Any], None]] = field(default_factory=list)
    """What places want served besides the page: each is called with the FastAPI application."""

    def resolve(self, relative: str, *, where: str = "path") -> Path:
        """A path below the root from what the page sent; refused when it leaves the root or has a hidden part."""
        joined = safe_join(self.root, relative, where=where)
        real = joined.resolve()
        if any(part.startswith(".") for part in (*Path(relative).parts, *real.relative_to(self.root).parts)):
            raise DataError(f"{where}: {relative!r} has a hidden part; only plain files below the folder are shown")
        return real

    def name_of(self, path: Path) -> str:
        """The path as the page shows it: relative to the root."""
        return path.relative_to(self.root).as_posix()

    def file_url(self, path: Path) -> str:
        """Where a browser finds a media file below the root: plays in <video>, with ranges."""
        name = self.name_of(path)
        self.resolve(name)
        stamp = path.stat().st_mtime_ns
        return f"{FILES_ROUTE}{quote(name)}?v={stamp:x}"

    def find_files(self, *suffixes: str) -> Iterator[Path]:
        """Plain files below the root with one of the endings, in order; hidden folders and links are not entered."""
        seen = 0
        for folder, folders, files in os.walk(self.root):
            depth = len(Path(folder).relative_to(self.root).parts)
            folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < _MAX_DEPTH else []
            for name in sorted(files):
                seen += 1
                if seen > _MAX_ENTRIES:
                    return
                path = Path(folder, name)
                if not name.startswith(".") and name.lower().endswith(suffixes) and not path.is_symlink():
                    yield path

    def on_close(self, closer: Callable[[], None]) -> None:
        """Called when the server ends, the last one first: stop threads and child processes here."""
        self._closers.append(closer)

    def close(self) -> None:
        while self._closers:
            self._closers.pop()()


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_SHOWN_S = 12


def tell_errors(handler: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """An event handler whose FrameloomError is shown as a message instead of ending in a traceback."""

    @wraps(handler)
    def told(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return handler(*args, **kwargs)
        except FrameloomError as error:
            raise gr.Error(escape(str(error)), duration=_SHOWN_S, title="Not done", print_exception=False) from error

    return told


def on_page_load(handler: Callable[..., Any], inputs: Any, outputs: Any, **settings: Any) -> Any:
    """Call `handler` whenever a browser opens the page that is being built."""
    page = Context.root_block
    assert page is not None, "a place is built inside the page"
    return page.load(handler, inputs, outputs, **settings)
