"""Training runs started from the page: child processes, each with a session and a log.

Each launch has a record and a log in `<folder>/launches`, which survive a restart of the studio.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError, RunError
from frameloom.core.files import write_json
from frameloom.core.logging import get_logger
from frameloom.core.paths import clean_name
from frameloom.studio.runs.run_list import find_holder

_log = get_logger(__name__)
_MAX_RUNNING = 8
_MAX_OVERRIDES = 20_000
_MAX_RECORDS = 200
_CHECK_TIMEOUT_S = 120.0
_TAIL_BYTES = 32 << 10
_CODES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# A run that was asked to stop and has saved ends with 128 and the number of the signal.
_STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM))


@dataclass(frozen=True)
class Launch:
    """One start of a run; `run` is its folder from the studio's, `exit_code` None while it runs."""

    id: str
    recipe: str
    overrides: tuple[str, ...]
    run: str
    pid: int
    started: float
    ended: float | None = None
    exit_code: int | None = None
    is_lost: bool = False
    """it ended while the studio was closed"""

    @property
    def state(self) -> str:
        """running, failed or stopped; a run that was stopped by a user or ended well has not failed."""
        if self.exit_code is None and not self.is_lost:
            return "running"
        return "failed" if (self.exit_code or 0) > 0 and self.exit_code not in _STOPPED else "stopped"

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    def describe_end(self) -> str:
        """How a start ended, in words."""
        code = self.exit_code
        if self.is_lost:
            return "ended while the studio was closed"
        if code is None:
            return "running"
        if code == 0:
            return "finished (exit code 0)"
        if code in _STOPPED:
            return f"stopped after saving (exit code {code})"
        if code < 0:
            return f"killed by {signal.Signals(-code).name} (exit code {code})"
        return f"failed (exit code {code})"


class Launches:
    """Starts and stops runs in `root`; records and logs are kept in `folder`."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        self._lock = threading.Lock()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping: set[str] = set()
        self._launches: dict[str, Launch] = {}
        records = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for path in records[-_MAX_RECORDS:]:
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
                launch = Launch(**{**values, "overrides": tuple(values["overrides"])})
            except (OSError, ValueError, TypeError, KeyError) as error:
                _log.warning("%s: left out, not a record of a start (%s)", path, error)
            else:
                self._launches[launch.id] = launch

    def recent(self) -> list[Launch]:
        """The newest first."""
        with self._lock:
            launches = [self._refresh(one) for one in self._launches.values()]
        return sorted(launches, key=lambda launch: launch.started, reverse=True)

    def find(self, run: str) -> Launch | None:
        """The last start of a run."""
        return next((launch for launch in self.recent() if launch.run == run), None)

    def find_failure(self, run: str) -> str | None:
        """Why the last start of a run failed; None if it did not, or if the run went on without the studio."""
        launch = self.find(run)
        if launch is None or launch.state != "failed" or launch.ended is None:
            return None
        metrics = self.root / run / "metrics.jsonl"
        if metrics.is_file() and metrics.stat().st_mtime > launch.ended + 1:
            return None
        lines = [line.strip() for line in self.read_log(launch).splitlines() if line.strip()]
        return " ".join(lines[-3:]) or f"ended with exit code {launch.exit_code}"

    def check(self, recipe: str, text: str) -> tuple[Recipe, str, list[str]]:
        """(recipe, name of the run, overrides as typed); ConfigError lists all that is wrong, files included."""
        overrides = split_words(text)
        file = self.root / recipe
        try:
            loaded = load_recipe(file if file.is_file() else recipe, overrides)
        except ConfigError as error:
            # Files are named by their path from the studio's folder, as the page shows them.
            raise ConfigError([problem.replace(f"{self.root}/", "") for problem in error.problems]) from error
        folder, root = (self.root / loaded.run.folder / loaded.name).resolve(), self.root.resolve()
        if not folder.is_relative_to(root) or folder == root:
            raise ConfigError(
                f"run.folder is {loaded.run.folder}: the run would be written to {folder}, outside of {root}, where "
                "the studio does not look; add --run.folder runs"
            )
        # Paths in a recipe start from the folder that a run is started in, so a process in that folder checks them.
        command = [sys.executable, "-m", "frameloom", "recipe", "check", recipe, *overrides]
        try:
            done = subprocess.run(
                command,
                cwd=self.root,
                capture_output=True,
                timeout=_CHECK_TIMEOUT_S,
                check=False,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{recipe}: took longer than {_CHECK_TIMEOUT_S:g} s to check; try again") from error
        if done.returncode:
            raise ConfigError(
                clean_text(done.stderr.decode(errors="replace")).strip() or f"{recipe}: cannot be checked"
            )
        return loaded, folder.relative_to(root).as_posix(), overrides

    def start(self, recipe: str, text: str = "") -> Launch:
        """Check, then train in a separate process; ConfigError or RunError say why not."""
        _, run, overrides = self.check(recipe, text)
        holder = find_holder(self.root / run)
        if holder is not None:
            raise RunError(f"{run}: is running already (process {holder.pid}); stop it first, or add --name")
        command = [sys.executable, "-m", "frameloom", "train", recipe, *overrides]
        with self._lock:
            if sum(self._refresh(one).is_running for one in self._launches.values()) >= _MAX_RUNNING:
                raise RunError(f"{_MAX_RUNNING} runs are running already; stop one of them, or wait for it")
            self.folder.mkdir(parents=True, exist_ok=True)
            stem, number = clean_name(run), 1
            while f"{stem}-{number}" in self._launches or (self.folder / f"{stem}-{number}.log").exists():
                number += 1
            key = f"{stem}-{number}"
            with (self.folder / f"{key}.log").open("xb") as log:
                process = subprocess.Popen(
                    command,
                    cwd=self.root,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                )
            launch = Launch(key, recipe, tuple(overrides), run, process.pid, time.time())
            self._processes[launch.id] = process
            self._keep(launch)
        threading.Thread(target=lambda: self._end(key, process.wait()), daemon=True).start()
        _log.info("started %s as process %d", run, process.pid)
        return launch

    def stop(self, run: str) -> str:
        """Ask a run to save and end; the second time, kill it. Returns a message for the page."""
        launch = self.find(run)
        if launch is not None and launch.is_running:
            is_second = launch.id in self._stopping
            self._stopping.add(launch.id)
            if is_second:
                _signal(os.killpg, launch.pid, signal.SIGKILL)
                return f"{run}: ended at once; what came after its last checkpoint is lost"
            _signal(os.kill, launch.pid, signal.SIGTERM)
            return f"{run}: asked to stop; it finishes its step and saves. Stop again to end it at once"
        holder = find_holder(self.root / run)
        if holder is None:
            return f"{run}: is not running"
        if not holder.is_here:
            return f"{run}: runs on {holder.host}; stop it there"
        _signal(os.kill, holder.pid, signal.SIGTERM)
        return f"{run}: asked to stop; it finishes its step and saves. Stop again to end it at once"

    def is_stopping(self, run: str) -> bool:
        """Whether a run was asked to stop and has not ended yet."""
        launch = self.find(run)
        return launch is not None and launch.is_running and launch.id in self._stopping

    def close(self, timeout_s: float = 60.0) -> None:
        """Ask all children to stop, wait until they have saved, and end those that have not by then."""
        with self._lock:
            children = {key: process for key, process in self._processes.items() if process.poll() is None}
        for key, process in children.items():
            self._stopping.add(key)
            _signal(os.kill, process.pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        for process in children.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(os.killpg, process.pid, signal.SIGKILL)
                process.wait()
        for key, process in children.items():
            self._end(key, process.returncode)

    def read_log(self, launch: Launch, num_lines: int = 40) -> str:
        """The last lines of a start, without control characters."""
        path = self.folder / f"{launch.id}.log"
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                text = file.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(clean_text(text).splitlines()[-num_lines:])

    def _end(self, key: str, code: int) -> None:
        with self._lock:
            launch = self._launches[key]
            if launch.exit_code is None:
                self._keep(replace(launch, exit_code=code, ended=time.time()))
            self._processes.pop(key, None)

    def _refresh(self, launch: Launch) -> Launch:
        """A start of an earlier studio runs as long as its process holds the run: process ids are reused."""
        if launch.is_running and launch.id not in self._processes:
            holder = find_holder(self.root / launch.run)
            if holder is None or holder.pid != launch.pid:
                launch = replace(launch, is_lost=True)
                self._launches[launch.id] = launch
        return launch

    def _keep(self, launch: Launch) -> None:
        self._launches[launch.id] = launch
        write_json(self.folder / f"{launch.id}.json", asdict(launch))


def split_words(text: str) -> list[str]:
    """Overrides as on a command line; lines may be broken anywhere."""
    if len(text) > _MAX_OVERRIDES:
        raise ConfigError(
            f"overrides: {len(text):,} characters; at most {_MAX_OVERRIDES:,} are read, use a recipe file"
        )
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"overrides: {error}; write them as --optim.lr 1e-5, with quotes in pairs") from error
    if words and not words[0].startswith("--"):
        raise ConfigError(f"overrides: '{words[0][:40]}' has no key in front; write --key value, as in --optim.lr 1e-5")
    if any("\0" in word for word in words):
        raise ConfigError("overrides: the text has a null byte; type it again")
    return words


def clean_text(text: str) -> str:
    """Without colour codes and control characters; a line that was written over (by a bar) shows its last state."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return "\n".join(_CODES.sub("", line) for line in lines)


def _signal(send: Callable[[int, int], None], pid: int, number: int) -> None:
    """By `os.kill`, or by `os.killpg` for the run and the processes that read its data."""
    with contextlib.suppress(ProcessLookupError):
        send(pid, number)
