"""Queue of sampling jobs for one worker process, with progress and cancelling."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.errors import RunError
from frameloom.core.logging import get_logger
from frameloom.studio.runs.launches import clean_text

_log = get_logger(__name__)
MAX_WAITING = 16
_MAX_ENDED = 20
_LAST_WORDS_BYTES = 4096

WAITING, LOADING, RUNNING, DONE, FAILED, CANCELLED = "waiting", "loading", "running", "done", "failed", "cancelled"
OPEN = (WAITING, LOADING, RUNNING)


@dataclass(frozen=True)
class Job:
    """`num` samples of a request by a model, as they stand at one moment; `files` are paths from the root."""

    id: int
    model: str
    request: SampleRequest
    num: int
    total_steps: int
    state: str = WAITING
    done_steps: int = 0
    message: str = ""
    files: tuple[str, ...] = ()
    is_stopping: bool = False

    @property
    def is_open(self) -> bool:
        return self.state in OPEN


class JobQueue:
    """Jobs in the order they came. The worker process starts with the first one and keeps its model."""

    def __init__(self, root: Path, log: Path, *, max_waiting: int = MAX_WAITING) -> None:
        self.root = root
        self.max_waiting = max_waiting
        self._log = log
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def submit(self, model: str, request: SampleRequest, num: int, total_steps: int) -> Job:
        """RunError when too many wait already."""
        with self._changed:
            num_open = sum(job.is_open for job in self._jobs.values())
            if num_open >= self.max_waiting:
                raise RunError(f"{num_open} jobs are in the queue, the maximum; wait for one, or cancel it")
            job = Job(next(self._numbers), model, request, num, total_steps)
            self._jobs[job.id] = job
            ended = sorted(number for number, known in self._jobs.items() if not known.is_open)
            for number in ended[: max(0, len(ended) - _MAX_ENDED)]:
                del self._jobs[number]
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return job

    def jobs(self) -> list[Job]:
        """The newest first."""
        with self._changed:
            return sorted(self._jobs.values(), key=lambda job: -job.id)

    def cancel(self, number: int) -> str:
        """Take a waiting job out, end a running one after its step; the second time, kill its process."""
        with self._changed:
            job = self._jobs.get(number)
            if job is None or not job.is_open:
                return "that job has already ended"
            if job.state == WAITING:
                self._set(number, state=CANCELLED)
                return "taken out of the queue"
            is_second = job.is_stopping
            self._set(number, is_stopping=True)
            if is_second:
                if self._process is not None:
                    self._process.kill()
                return "killed"
            self._send({"cancel": number})
            return "stops after this step"

    def close(self) -> None:
        """End the worker; jobs that wait are lost."""
        with self._changed:
            self._is_closed = True
            process = self._process
            self._changed.notify_all()
        if process is None:
            return
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._thread is not None:
            self._thread.join()
        _release(process)

    def _set(self, number: int, **values: Any) -> None:
        self._jobs[number] = replace(self._jobs[number], **values)
        self._changed.notify_all()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._run(job)
            except OSError as error:
                _log.warning("the worker cannot be reached (%s)", error)
            with self._changed:
                if not self._is_closed and self._jobs[job.id].is_open:
                    self._end_lost(job.id)

    def _next(self) -> Job | None:
        with self._changed:
            while not self._is_closed:
                waiting = [number for number, job in self._jobs.items() if job.state == WAITING]
                if waiting:
                    number = min(waiting)
                    self._set(number, state=LOADING if self._process is None else RUNNING)
                    return self._jobs[number]
                self._changed.wait()
            return None

    def _run(self, job: Job) -> None:
        """Follow the events of one job, until it is over or the worker is."""
        with self._changed:
            if self._is_closed:
                return
            if self._process is None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                with self._log.open("wb") as log:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "frameloom.studio.generate.worker"],
                        cwd=self.root,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        encoding="utf-8",
                        start_new_session=True,
                        env={**os.environ, "PYTHONUNBUFFERED": "1"},
                    )
            process = self._process
            request = job.request.model_dump(mode="json", exclude_unset=True)
            self._send({"id": job.id, "model": job.model, "request": request, "num": job.num})
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["id"] != job.id:
                continue
            with self._changed:
                kind = event["event"]
                if kind == LOADING:
                    self._set(job.id, state=LOADING)
                elif kind == "step":
                    self._set(job.id, state=RUNNING, done_steps=self._jobs[job.id].done_steps + event["count"])
                else:
                    files, message = tuple(event.get("files", ())), clean_text(event.get("message", ""))
                    self._set(job.id, state=kind, files=files, message=message)
                    return

    def _end_lost(self, number: int) -> None:
        """The worker ended in the middle of a job: we killed it, or the system did when memory ran out."""
        process, self._process = self._process, None
        assert process is not None
        code = process.wait()
        _release(process)
        if self._jobs[number].is_stopping:
            self._set(number, state=CANCELLED)
            return
        why = "perhaps memory ran out; ask for fewer frames or a smaller size"
        if code != -9:
            text = self._log.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace") if self._log.is_file() else ""
            lines = [line for line in clean_text(text).splitlines() if line.strip()]
            why = lines[-1] if lines else "no message"
        self._set(number, state=FAILED, message=f"the process that makes videos ended (exit code {code}): {why}")

    def _send(self, message: dict[str, Any]) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        # The reading thread notices that the process has ended.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()


def _release(process: subprocess.Popen[str]) -> None:
    """Close the pipes of a process that has ended."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
