"""List of the runs below a folder, with the state and metrics of each.

A line counts once it is whole. A run that resumes writes its file anew, without the steps that it repeats; then, and
only then, reading starts again.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import FrameloomError

RECIPE = "recipe.yaml"
_SIGNS = ("metrics.jsonl", "checkpoints", "lock")
_MAX_DEPTH = 8
_MAX_ENTRIES = 50_000
_RESCAN_S = 5.0
_RATE_RECORDS = 5

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"


@dataclass(frozen=True)
class RunFacts:
    """What the saved recipe says; of one that cannot be read, that."""

    task: str = ""
    model: str = ""
    num_steps: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class RunView:
    """A run at one moment. `message` is why it failed, or who runs it."""

    name: str
    path: Path
    state: str
    facts: RunFacts
    step: int
    seconds_left: float | None
    loss: float | None
    message: str = ""


class Run:
    """One run folder; keeps its metrics and its recipe's facts between looks."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.metrics = MetricsTail(path / "metrics.jsonl")
        self._facts = RunFacts()
        self._facts_mark: tuple[int, int] | None = None

    def facts(self) -> RunFacts:
        """Read again only when the file has changed."""
        try:
            status = (self.path / RECIPE).stat()
        except OSError:
            return self._facts
        mark = (status.st_mtime_ns, status.st_size)
        if mark != self._facts_mark:
            self._facts, self._facts_mark = read_facts(self.path / RECIPE), mark
        return self._facts

    def view(self, find_failure: Callable[[str], str | None]) -> RunView:
        self.metrics.look()
        facts, holder = self.facts(), find_holder(self.path)
        step = max(self.metrics.last_step, 0 if holder else self._saved_step())
        state, message = self._judge(facts, holder, step, find_failure)
        left = self._time_left(facts, step) if state == RUNNING else None
        return RunView(self.name, self.path, state, facts, step, left, self.metrics.last("train/loss"), message)

    def _judge(
        self, facts: RunFacts, holder: Holder | None, step: int, find_failure: Callable[[str], str | None]
    ) -> tuple[str, str]:
        if holder is not None:
            return RUNNING, f"process {holder.pid}" + ("" if holder.is_here else f" on {holder.host}")
        failure = find_failure(self.name)
        if failure is not None:
            return FAILED, failure
        is_whole = facts.num_steps is None or step >= facts.num_steps
        return (FINISHED if is_whole and (self.path / "export").is_dir() else STOPPED), ""

    def _saved_step(self) -> int:
        """The newest checkpoint, for a run that was stopped before its first record."""
        try:
            names = os.listdir(self.path / "checkpoints")
        except OSError:
            return 0
        return max((int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal()), default=0)

    def _time_left(self, facts: RunFacts, step: int) -> float | None:
        rates = [rate for rate in self.metrics.series("train/steps_per_s").values[-_RATE_RECORDS:] if rate > 0]
        if facts.num_steps is None or not rates:
            return None
        # The mean of the times, not of the rates: each record stands for as many steps.
        return max(0, facts.num_steps - step) * sum(1 / rate for rate in rates) / len(rates)


def read_facts(recipe: Path) -> RunFacts:
    try:
        loaded = load_recipe(recipe)
    except (FrameloomError, OSError) as error:
        return RunFacts(problem=str(error).partition("\n")[0])
    part: Any = loaded.vae if loaded.task == "autoencoder" else loaded.model
    kind = loaded.vae.name if loaded.task == "autoencoder" else loaded.model.family
    return RunFacts(loaded.task, f"{kind}/{part.size}", loaded.train.steps)


def walk_folders(root: Path, is_leaf: Callable[[str, set[str]], bool]) -> Iterator[tuple[str, set[str]]]:
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


class RunIndex:
    """The runs below `root`, by their path from there. Searched anew when the last search is some seconds old."""

    def __init__(self, root: Path, find_failure: Callable[[str], str | None] = lambda name: None) -> None:
        self.root = root
        self._find_failure = find_failure
        self._runs: dict[str, Run] = {}
        self._searched = float("-inf")
        self._lock = threading.Lock()

    def runs(self, *, fresh: bool = False) -> dict[str, Run]:
        with self._lock:
            if fresh or time.monotonic() - self._searched > _RESCAN_S:
                found = set(find_runs(self.root))
                self._runs = {name: self._runs.get(name) or Run(name, self.root / name) for name in sorted(found)}
                self._searched = time.monotonic()
            return dict(self._runs)

    def get(self, name: str) -> Run | None:
        """A run by a name that a page sent: only what the search has found is opened."""
        return self.runs().get(name)

    def views(self) -> list[RunView]:
        """Running ones first, then by name."""
        views = [run.view(self._find_failure) for run in self.runs().values()]
        return sorted(views, key=lambda view: (view.state != RUNNING, view.name))


def find_runs(root: Path) -> list[str]:
    """Paths of run folders from `root`; what lies inside of one is not searched."""

    def is_run(relative: str, names: set[str]) -> bool:
        return is_run_folder(root / relative, names)

    return sorted(relative for relative, names in walk_folders(root, is_run) if is_run(relative, names))


def is_run_folder(path: Path, names: set[str]) -> bool:
    """A recipe that is a file of its own, beside what only a run leaves."""
    recipe = path / RECIPE
    return RECIPE in names and any(sign in names for sign in _SIGNS) and recipe.is_file() and not recipe.is_symlink()


_HOLDER = re.compile(r"process (\d{1,9}) on (\S{1,255})")
_LOCKS = Path("/proc/locks")
# A run on another machine cannot be asked; one that wrote something this lately counts as running.
_FRESH_S = 300.0


@dataclass(frozen=True)
class Holder:
    pid: int
    host: str
    is_here: bool
    """on this machine"""


def find_holder(run: Path) -> Holder | None:
    """The process that trains in a folder now; the words of a dead process in the lock count for nothing."""
    lock = run / "lock"
    try:
        text = lock.read_text(encoding="utf-8", errors="replace")
        inode = lock.stat().st_ino
    except OSError:
        return None
    match = _HOLDER.match(text)
    if match is None:
        return None
    pid, host = int(match[1]), match[2]
    if host != socket.gethostname():
        return Holder(pid, host, is_here=False) if _is_fresh(run) else None
    return Holder(pid, host, is_here=True) if is_alive(pid) and _is_locked(inode, pid) else None


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # a system without /proc
    return status.rpartition(")")[2].split()[:1] != ["Z"]


def _is_locked(inode: int, pid: int) -> bool:
    """Whether the system knows of such a lock; where it does not tell, the living process is believed."""
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return True
    words = [line.split() for line in lines if " FLOCK " in line]
    return any(len(word) > 5 and word[4] == str(pid) and word[5].endswith(f":{inode}") for word in words)


def _is_fresh(run: Path) -> bool:
    try:
        return time.time() - (run / "metrics.jsonl").stat().st_mtime < _FRESH_S
    except OSError:
        return False


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
