"""Queue of sampling jobs for one worker process, with progress and cancelling."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frameloom.core.errors import RunError
from frameloom.core.logging import get_logger
from frameloom.studio.generate.requests import Wish
from frameloom.studio.runs.launches import clean_text

_log = get_logger(__name__)
MAX_WAITING = 16
_MAX_ENDED = 20
_LAST_WORDS_BYTES = 4096

WAITING, LOADING, RUNNING, DONE, FAILED, CANCELLED = "waiting", "loading", "running", "done", "failed", "cancelled"
OPEN = (WAITING, LOADING, RUNNING)


@dataclass(frozen=True)
class Ticket:
    """An order at one moment; `files` are paths from the root."""

    id: int
    wish: Wish
    total_steps: int
    state: str = WAITING
    done_steps: int = 0
    message: str = ""
    files: tuple[str, ...] = ()
    asked_to_stop: bool = False

    @property
    def is_open(self) -> bool:
        return self.state in OPEN


class OrderQueue:
    """Orders in the order they came. The worker process starts with the first one and keeps its model."""

    def __init__(self, root: Path, log: Path, *, max_waiting: int = MAX_WAITING) -> None:
        self.root = root
        self.max_waiting = max_waiting
        self._log = log
        self._numbers = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def submit(self, wish: Wish, total_steps: int) -> Ticket:
        """RunError when too many wait already."""
        with self._changed:
            num_open = sum(ticket.is_open for ticket in self._tickets.values())
            if num_open >= self.max_waiting:
                raise RunError(f"{num_open} orders are in the queue, which is the most; wait for one, or cancel it")
            ticket = Ticket(next(self._numbers), wish, total_steps)
            self._tickets[ticket.id] = ticket
            self._forget_old()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return ticket

    def tickets(self) -> list[Ticket]:
        """The newest first."""
        with self._changed:
            return sorted(self._tickets.values(), key=lambda ticket: -ticket.id)

    def get(self, number: int) -> Ticket | None:
        with self._changed:
            return self._tickets.get(number)

    def cancel(self, number: int) -> str:
        """Take a waiting order out, end a running one after its step; asked again, end the process that makes it."""
        with self._changed:
            ticket = self._tickets.get(number)
            if ticket is None or not ticket.is_open:
                return "that order is over already"
            if ticket.state == WAITING:
                self._set(number, state=CANCELLED)
                return "taken out of the queue"
            is_second = ticket.asked_to_stop
            self._set(number, asked_to_stop=True)
            if is_second:
                self._kill()
                return "ended at once"
            self._send({"cancel": number})
            return "stops after this step"

    def wait(self, number: int, timeout_s: float) -> Ticket:
        """Return when the order is over, or after the time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._tickets[number].is_open, timeout_s)
            return self._tickets[number]

    def close(self) -> None:
        """End the worker; orders that wait are lost."""
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
        self._tickets[number] = replace(self._tickets[number], **values)
        self._changed.notify_all()

    def _forget_old(self) -> None:
        ended = sorted(number for number, ticket in self._tickets.items() if not ticket.is_open)
        for number in ended[: max(0, len(ended) - _MAX_ENDED)]:
            del self._tickets[number]

    def _work(self) -> None:
        while (ticket := self._next()) is not None:
            try:
                for event in self._ask_worker(ticket):
                    self._take(ticket.id, event)
            except OSError as error:
                _log.warning("the worker cannot be reached (%s)", error)
            with self._changed:
                if not self._is_closed and self._tickets[ticket.id].is_open:
                    self._end_lost(ticket.id)

    def _next(self) -> Ticket | None:
        with self._changed:
            while not self._is_closed:
                waiting = [number for number, ticket in self._tickets.items() if ticket.state == WAITING]
                if waiting:
                    number = min(waiting)
                    self._set(number, state=LOADING if self._process is None else RUNNING)
                    return self._tickets[number]
                self._changed.wait()
            return None

    def _ask_worker(self, ticket: Ticket) -> Iterator[dict[str, Any]]:
        """Events of one order, until it is over or the worker is."""
        with self._changed:
            if self._is_closed:
                return
            process = self._process = self._process or self._start()
            self._send({"id": ticket.id, "wish": ticket.wish.to_dict()})
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["id"] == ticket.id:
                yield event
                if event["event"] in (DONE, FAILED, CANCELLED):
                    return

    def _take(self, number: int, event: dict[str, Any]) -> None:
        with self._changed:
            kind = event["event"]
            if kind == "step":
                done = self._tickets[number].done_steps + event["count"]
                self._set(number, state=RUNNING, done_steps=done)
            elif kind == LOADING:
                self._set(number, state=LOADING)
            else:
                files = tuple(event.get("files", ()))
                self._set(number, state=kind, files=files, message=clean_text(event.get("message", "")))

    def _end_lost(self, number: int) -> None:
        """The worker ended in the middle of an order: by our hand, or the system's when memory ran out."""
        process, self._process = self._process, None
        assert process is not None
        code = process.wait()
        _release(process)
        if self._tickets[number].asked_to_stop:
            self._set(number, state=CANCELLED)
            return
        why = "perhaps memory ran out; ask for fewer frames or a smaller size" if code == -9 else self._last_words()
        self._set(number, state=FAILED, message=f"the process that makes videos ended (exit code {code}): {why}")

    def _start(self) -> subprocess.Popen[str]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            return subprocess.Popen(
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

    def _send(self, message: dict[str, Any]) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        # A process that has just ended is noticed by the one who reads from it.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _last_words(self) -> str:
        try:
            text = self._log.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace")
        except OSError:
            return "it left no message"
        lines = [line for line in clean_text(text).splitlines() if line.strip()]
        return lines[-1] if lines else "it left no message"


def _release(process: subprocess.Popen[str]) -> None:
    """Close the pipes of a process that has ended."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
