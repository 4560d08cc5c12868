"""Run folders below the root: the state and metrics of each, read from its files.

A line of metrics counts once it is whole. A run that resumes writes its file anew, without the steps that it repeats;
then, and only then, reading starts again.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from array import array
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import FrameloomError
from frameloom.studio.server.context import walk_folders

RECIPE = "recipe.yaml"
_SIGNS = ("metrics.jsonl", "checkpoints", "lock")
_RATE_RECORDS = 5

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"


@dataclass(frozen=True)
class RunView:
    """A run at one moment. `about` is its task and model, `message` why it failed, or who runs it."""

    name: str
    path: Path
    state: str
    about: str
    num_steps: int | None
    step: int
    seconds_left: float | None
    loss: float | None
    message: str = ""


class Run:
    """One run folder; keeps its metrics between looks."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.metrics = MetricsTail(path / "metrics.jsonl")

    def view(self, failure: str | None = None) -> RunView:
        """The run now; `failure` is why its last start failed."""
        self.metrics.read()
        try:
            changed = (self.path / RECIPE).stat()
            about, num_steps = read_facts(self.path / RECIPE, changed.st_mtime_ns, changed.st_size)
        except OSError:
            about, num_steps = "", None
        holder = find_holder(self.path)
        step = max(self.metrics.last_step, 0 if holder else self._saved_step())
        state, message, left = STOPPED, "", None
        if holder is not None:
            state, message = RUNNING, f"process {holder.pid}" + ("" if holder.is_here else f" on {holder.host}")
            rates = [rate for _, rate in self.metrics.points("train/steps_per_s")[-_RATE_RECORDS:] if rate > 0]
            if num_steps is not None and rates:
                # The mean of the times, not of the rates: each record stands for as many steps.
                left = max(0, num_steps - step) * sum(1 / rate for rate in rates) / len(rates)
        elif failure is not None:
            state, message = FAILED, failure
        elif (num_steps is None or step >= num_steps) and (self.path / "export").is_dir():
            state = FINISHED
        losses = self.metrics.points("train/loss")
        return RunView(
            self.name, self.path, state, about, num_steps, step, left, losses[-1][1] if losses else None, message
        )

    def _saved_step(self) -> int:
        """The newest checkpoint, for a run that was stopped before its first record."""
        try:
            names = os.listdir(self.path / "checkpoints")
        except OSError:
            return 0
        return max((int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal()), default=0)


@lru_cache(maxsize=1024)
def read_facts(recipe: Path, _changed_ns: int, _num_bytes: int) -> tuple[str, int | None]:
    """The task and model in words, and the steps; of a recipe that cannot be read, what is wrong with it."""
    try:
        loaded = load_recipe(recipe)
    except (FrameloomError, OSError) as error:
        return str(error).partition("\n")[0], None
    model = f"{loaded.model.family}/{loaded.model.size}"
    if loaded.task == "autoencoder":
        model = f"{loaded.vae.name}/{loaded.vae.size}"
    return f"{loaded.task} · {model}", loaded.train.steps


def find_runs(root: Path) -> list[str]:
    """Paths of run folders from `root`; what lies inside of one is not searched."""
    folders = walk_folders(root, lambda relative, names: is_run_folder(root / relative, names))
    return sorted(relative for relative, names in folders if is_run_folder(root / relative, names))


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
    """The process that trains in a folder; `is_here`: on this machine."""

    pid: int
    host: str
    is_here: bool


def find_holder(run: Path) -> Holder | None:
    """The process that trains in a folder now; the name of a dead process in the lock does not count."""
    lock = run / "lock"
    try:
        text = lock.read_text(encoding="utf-8", errors="replace")
        inode = lock.stat().st_ino
        match = _HOLDER.match(text)
        if match is None:
            return None
        pid, host = int(match[1]), match[2]
        if host != socket.gethostname():
            is_fresh = time.time() - (run / "metrics.jsonl").stat().st_mtime < _FRESH_S
            return Holder(pid, host, is_here=False) if is_fresh else None
    except OSError:
        return None
    if not is_alive(pid):
        return None
    try:
        locks = [line.split() for line in _LOCKS.read_text().splitlines() if " FLOCK " in line]
    except OSError:
        # Where the system lists no locks, a living process counts as the holder.
        return Holder(pid, host, is_here=True)
    is_locked = any(len(lock) > 5 and lock[4] == str(pid) and lock[5].endswith(f":{inode}") for lock in locks)
    return Holder(pid, host, is_here=True) if is_locked else None


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


_CHUNK_BYTES = 1 << 20
# One look reads at most this much, so that a huge file is taken in over several looks.
_MAX_BYTES_PER_LOOK = 32 << 20
_MAX_LINE_BYTES = 1 << 20
_MAX_SERIES = 256


class MetricsTail:
    """The metrics of a growing file; `read` takes in what was added, and several pages may call it at once.

    `version` changes with every new record; `num_read_bytes` counts all that was read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0
        self.num_read_bytes = 0
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._steps: dict[str, array[int]] = defaultdict(lambda: array("q"))
        self._values: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self._offset = 0
        self._inode: int | None = None
        self._rest = b""
        self._skips_line = False
        self.last_step = 0

    def read(self) -> bool:
        """Read what is new; True if there was any."""
        with self._lock:
            before = self.version
            try:
                with self.path.open("rb") as file:
                    status = os.fstat(file.fileno())
                    if self._inode != status.st_ino or status.st_size < self._offset:
                        self.version += 1 if self._offset else 0
                        self._forget()
                        self._inode = status.st_ino
                    budget = _MAX_BYTES_PER_LOOK
                    while budget > 0 and (chunk := os.pread(file.fileno(), _CHUNK_BYTES, self._offset)):
                        self._offset += len(chunk)
                        self.num_read_bytes += len(chunk)
                        budget -= len(chunk)
                        self._take(chunk)
            except OSError:
                # Not there yet, or no longer.
                if self._offset:
                    self._forget()
                    self.version += 1
            return self.version != before

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric; a value that was not finite is NaN."""
        with self._lock:
            if name not in self._steps:
                return []
            return list(zip(self._steps[name], self._values[name], strict=True))

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._steps)

    def _take(self, chunk: bytes) -> None:
        """Lines that are no records are skipped: a page that shows a run must not fail because of one."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            is_skipped, self._skips_line = self._skips_line, False
            try:
                record: Any = None if is_skipped else json.loads(line)
            except ValueError:
                continue
            step = record.pop("step", None) if isinstance(record, dict) else None
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 62:
                continue
            self.last_step = max(self.last_step, step)
            self.version += 1
            for name, value in record.items():
                if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                    continue
                if name in self._steps or len(self._steps) < _MAX_SERIES:
                    self._steps[name].append(step)
                    self._values[name].append(float("nan") if value is None else float(value))
        if len(self._rest) > _MAX_LINE_BYTES:
            self._rest, self._skips_line = b"", True
