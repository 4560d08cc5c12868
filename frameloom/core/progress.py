"""Progress of long work: a live bar on a terminal, a plain line every few seconds in a log file."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressBar:
    """Counts `total` pieces of work. Use as a context manager and call `advance`."""

    def __init__(
        self,
        title: str,
        total: int,
        *,
        done: int = 0,
        stream: TextIO | None = None,
        every_s: float = 10.0,
        is_shown: bool = True,
    ) -> None:
        self.title = title
        self.total = total
        self.done = done
        self._first = done
        self._stream = stream or sys.stderr
        self._every_s = every_s
        self._is_shown = is_shown
        self._started = self._printed = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        console = Console(file=self._stream)
        if console.is_terminal and self._is_shown:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, completed=self.done, note="")
        return self

    def advance(self, count: int = 1, note: str = "") -> None:
        """Say that `count` more pieces are done; `note` is shown behind the bar."""
        self.done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, note=note)
            return
        if not self._is_shown:
            return
        now = time.monotonic()
        if now - self._printed >= self._every_s or self.done >= self.total:
            self._printed = now
            rate = (self.done - self._first) / max(now - self._started, 1e-9)
            left = f"{(self.total - self.done) / rate:.0f} s left" if rate > 0 else "starting"
            share = 100 * self.done / max(self.total, 1)
            text = f"{self.title}: {self.done}/{self.total} ({share:.0f}%), {rate:.2f}/s, {left}"
            self._stream.write(f"{text} {note}".rstrip() + "\n")
            self._stream.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
