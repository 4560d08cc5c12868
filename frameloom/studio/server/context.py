"""Shared context of the tabs: root folder, limits, path checks, error reporting."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from html import escape
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar
from urllib.parse import quote

import gradio as gr
from gradio.context import Context

from frameloom.core.errors import DataError, FrameloomError
from frameloom.core.paths import safe_join
from frameloom.studio.server.markup import problem_list

FILES_ROUTE = "/files/"
# Files that the page may fetch; all others are only read by the server.
SERVED_SUFFIXES = frozenset({".mp4", ".webm", ".gif", ".png", ".jpg", ".jpeg", ".webp", ".html", ".mov", ".mkv"})
_MAX_DEPTH = 8
_MAX_ENTRIES = 50_000


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

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
    closers: ExitStack = field(default_factory=ExitStack)
    """Called when the server ends, the last one first: the tabs stop their threads and child processes here."""
    routes: list[Callable[[Any], None]] = field(default_factory=list)
    """Routes of tabs besides the page: each is called with the FastAPI application."""

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
        """Plain files below the root with one of the suffixes, in order; hidden folders and links are not entered."""
        for folder, names in walk_folders(self.root):
            for name in sorted(names):
                path = self.root / folder / name
                is_named = not name.startswith(".") and name.lower().endswith(suffixes)
                if is_named and not path.is_symlink() and path.is_file():
                    yield path


def walk_folders(
    root: Path, is_leaf: Callable[[str, set[str]], bool] = lambda relative, names: False
) -> Iterator[tuple[str, set[str]]]:
    """Each folder from `root` on ('.' is itself) with the names in it; nothing is searched below a leaf.

    Links and hidden folders are left out. A walk ends after so many names that a page can still wait for it.
    """
    budget = _MAX_ENTRIES
    waiting = [(".", 0)]
    while waiting and budget > 0:
        relative, depth = waiting.pop()
        names: set[str] = set()
        inner: list[str] = []
        try:
            with os.scandir(root / relative) as entries:
                for entry in entries:
                    names.add(entry.name)
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                        inner.append(entry.name)
        except OSError:
            continue
        budget -= len(names)
        yield relative, names
        if depth < _MAX_DEPTH and not is_leaf(relative, names):
            parent = "" if relative == "." else f"{relative}/"
            waiting += [(f"{parent}{name}", depth + 1) for name in sorted(inner, reverse=True)]


_Item = TypeVar("_Item")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_SHOWN_S = 12
_RESCAN_S = 5.0
# Settings of events that are not shown as work in progress, and are no API.
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


class Listing(Generic[_Item]):
    """Search results by name; the search is repeated when they are a few seconds old.

    Names that a page sent are only looked up here, so nothing else is opened.
    """

    def __init__(self, search: Callable[[], dict[str, _Item]]) -> None:
        self._search = search
        self._found: dict[str, _Item] = {}
        self._searched = float("-inf")
        self._lock = threading.Lock()

    def all(self, *, fresh: bool = False) -> dict[str, _Item]:
        with self._lock:
            if fresh or time.monotonic() - self._searched > _RESCAN_S:
                self._found, self._searched = self._search(), time.monotonic()
            return dict(self._found)


def show_problems(handler: Callable[_Arguments, str]) -> Callable[_Arguments, str]:
    """An event handler with an HTML answer, which lists what is wrong instead of raising a FrameloomError."""

    @wraps(handler)
    def answering(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> str:
        try:
            return handler(*args, **kwargs)
        except FrameloomError as error:
            return problem_list(error)

    return answering


def show_errors(handler: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """An event handler whose FrameloomError is shown as a message instead of ending in a traceback."""

    @wraps(handler)
    def raising(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return handler(*args, **kwargs)
        except FrameloomError as error:
            raise gr.Error(escape(str(error)), duration=_SHOWN_S, title="Not done", print_exception=False) from error

    return raising


def on_page_load(handler: Callable[..., Any], inputs: Any, outputs: Any, **settings: Any) -> Any:
    """Call `handler` whenever a browser opens the page that is being built."""
    page = Context.root_block
    assert page is not None, "a tab is built inside the page"
    return page.load(handler, inputs, outputs, **settings)


def read_click(event: gr.EventData) -> tuple[str, str]:
    """The (act, key) of a button in our HTML; empty for anything else."""
    data = event._data if isinstance(event._data, dict) else {}
    act, key = data.get("act"), data.get("key")
    return (act, key) if isinstance(act, str) and isinstance(key, str) else ("", "")


def updates(
    last: Mapping[str, Any] | None, now: Mapping[str, Any], makers: Mapping[str, Callable[[], Any]]
) -> list[Any]:
    """New contents of what has changed, and `gr.skip()` for the rest: a player sent again would restart."""
    last = last or {}
    return [gr.skip() if key in last and last[key] == now[key] else make() for key, make in makers.items()]
