"""The runs below a folder: found by their files, and what each of them is doing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frameloom.config.load import load_recipe
from frameloom.core.errors import FrameloomError
from frameloom.studio.metrics_tail import MetricsTail
from frameloom.studio.run_lock import Holder, find_holder

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
