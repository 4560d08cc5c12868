"""The metrics of a run that may still be writing them: read on from where the last look ended.

A line counts once it is whole. A run that resumes writes its file anew, without the steps that it repeats; then, and
only then, reading starts again.
"""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_CHUNK_BYTES = 1 << 20
# One look reads at most this much, so that a huge file is taken in over several looks.
_MAX_BYTES_PER_LOOK = 32 << 20
_MAX_LINE_BYTES = 1 << 20
_MAX_SERIES = 256


@dataclass
class Series:
    """One metric: steps and values side by side; a value that was not finite is NaN."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def points(self) -> Iterator[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)


class MetricsTail:
    """`look` takes in what was added to the file; several pages may look at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0
        """changes with every new record"""
        self.num_read_bytes = 0
        """in all, also of a file that was written anew"""
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._series: dict[str, Series] = {}
        self._offset = 0
        self._inode: int | None = None
        self._rest = b""
        self._skips_line = False
        self.last_step = 0

    def look(self) -> bool:
        """Read what is new; True if there was any."""
        with self._lock:
            before = self.version
            try:
                with self.path.open("rb") as file:
                    self._read_on(file.fileno())
            except OSError:
                # Not there yet, or no longer.
                if self._offset:
                    self._forget()
                    self.version += 1
            return self.version != before

    def series(self, name: str) -> Series:
        """A copy that does not grow any more."""
        with self._lock:
            found = self._series.get(name, Series())
            return Series(found.steps[:], found.values[:])

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._series)

    def last(self, name: str) -> float | None:
        with self._lock:
            found = self._series.get(name)
            return found.values[-1] if found else None

    def _read_on(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if self._inode != status.st_ino or status.st_size < self._offset:
            if self._offset:
                self.version += 1
            self._forget()
            self._inode = status.st_ino
        budget = _MAX_BYTES_PER_LOOK
        while budget > 0 and (chunk := os.pread(descriptor, _CHUNK_BYTES, self._offset)):
            self._offset += len(chunk)
            self.num_read_bytes += len(chunk)
            budget -= len(chunk)
            self._take(chunk)

    def _take(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if not self._skips_line:
                self._take_line(line)
            self._skips_line = False
        if len(self._rest) > _MAX_LINE_BYTES:
            self._rest, self._skips_line = b"", True

    def _take_line(self, line: bytes) -> None:
        """Lines that are not ours are passed over: a page that shows a run must not fail because of one."""
        try:
            record = json.loads(line)
        except ValueError:
            return
        step = record.pop("step", None) if isinstance(record, dict) else None
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 62:
            return
        self.last_step = max(self.last_step, step)
        self.version += 1
        for name, value in record.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                continue
            if name in self._series or len(self._series) < _MAX_SERIES:
                series = self._series.setdefault(name, Series())
                series.steps.append(step)
                series.values.append(float("nan") if value is None else float(value))
