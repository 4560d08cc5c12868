"""Processes that start warm: a parent imports everything once and forks what tests ask for.

    python -m tests.faults.warm        reads requests from its input, a JSON object a line, and answers each

A start of the real program costs seconds of imports, a fork of a process that has done them milliseconds; so hundreds
of processes can be killed, and commands be run as a person runs them. The parent itself computes nothing: threads
would not survive the fork.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.faults.injection import install
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
COMMAND = "tests.faults.warm:run_command"
PLAIN = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "2", "PYTHONPATH": str(ROOT)}
WARM = (
    "torch.distributed",
    "torch.distributed.device_mesh",
    "frameloom.cli.main",
    "frameloom.cli.train",
    "frameloom.checkpoint.writer",
    "frameloom.training.train",
    "frameloom.training.loop",
    "torchmetrics.functional.image",
    "transformers.models.bert.modeling_bert",
    "av",
)


@dataclass(frozen=True)
class Child:
    """`log` has what it prints; also its errors, unless those have a file of their own."""

    pid: int
    log: Path
    errors: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)


class Warm:
    """The side of the tests: starts functions or commands in forked processes."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, **PLAIN}
        command = [sys.executable, "-m", "tests.faults.warm"]
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()  # now it is warm, and times can be taken

    def start(self, call: str, *args: Any, env: dict[str, str] | None = None) -> Child:
        """Fork a process that calls `module:function` with JSON arguments."""
        # The whole environment of now: the parent's own may be that of a test which had changed it for itself.
        return self._start(call, args, env={**os.environ, **PLAIN, **(env or {})})

    def _start(self, call: str, args: Sequence[Any], *, splits: bool = False, **more: Any) -> Child:
        self._count += 1
        log = self._folder / f"log-{self._count}"
        errors = log.with_name(f"{log.name}-errors") if splits else log
        answer = self._ask(do="start", call=call, args=args, log=str(log), errors=str(errors), **more)
        return Child(answer["pid"], log, errors)

    def command(self, *words: str, env: dict[str, str] | None = None) -> Child:
        """Fork `frameloom WORDS`."""
        return self.start(COMMAND, list(words), env=env)

    def start_frameloom(
        self, words: Sequence[object], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Child:
        """Fork `frameloom WORDS` as `subprocess` would start it: in a folder, with all of `env` and nothing else."""
        own = {**PLAIN, **(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
        words, folder = [str(word) for word in words], str(cwd or Path.cwd())
        return self._start(COMMAND, [words], splits=True, env=own, cwd=folder)

    def finish(self, child: Child, limit_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` would give."""
        code = self.wait(child, limit_s)
        return subprocess.CompletedProcess(["frameloom"], code, child.output, child.errors.read_text(errors="replace"))

    def ranks(self, call: str, args: Sequence[Any], num_ranks: int, env: dict[str, str] | None = None) -> list[Child]:
        """One process for each rank, with the environment that torchrun gives."""
        (port,) = free_ports(1)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks), **(env or {})}
        return [
            self.start(call, *args, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(num_ranks)
        ]

    def train_ranks(self, words: Sequence[str], num_ranks: int, env: dict[str, str] | None = None) -> list[Child]:
        return self.ranks(COMMAND, [["train", *words]], num_ranks, env)

    def wait(self, child: Child, limit_s: float = 120.0) -> int:
        """The exit code; a child that does not end in time is killed and fails the test."""
        code = self._ask(do="wait", pid=child.pid, limit_s=limit_s)["code"]
        assert code is not None, f"a hang: not ended after {limit_s} s\n{child.output}"
        return int(code)

    def poll(self, child: Child) -> int | None:
        """The exit code, once; None while it runs."""
        code = self._ask(do="poll", pid=child.pid)["code"]
        return None if code is None else int(code)

    def expect(self, child: Child, code: int = 0, limit_s: float = 280.0) -> str:
        """What a child printed that has to end with this code."""
        found = self.wait(child, limit_s)
        assert found == code, f"exit code {found}\n{child.output}"
        return child.output

    def expect_all(self, children: Sequence[Child], limit_s: float = 280.0) -> list[str]:
        """The same of ranks that have to succeed."""
        codes = [self.wait(child, limit_s) for child in children]
        assert not any(codes), (codes, [child.output for child in children])
        return [child.output for child in children]

    def run(self, call: str, *args: Any, env: dict[str, str] | None = None, limit_s: float = 280.0) -> str:
        """Start, wait, and expect success."""
        return self.expect(self.start(call, *args, env=env), limit_s=limit_s)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=120)

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the warm parent is gone"
        return dict(json.loads(line))


@functools.cache
def warm_parent() -> Warm:
    """The parent of all warm processes of this test process; it ends with it."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    parent = Warm(Path(folder.name))

    def end_parent() -> None:
        parent.close()
        folder.cleanup()

    atexit.register(end_parent)
    return parent


def run_frameloom(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """`frameloom WORDS` in a process that starts warm, and what it printed."""
    parent = warm_parent()
    return parent.finish(parent.start_frameloom(words, cwd=cwd, env=env), timeout)


def run_command(words: list[str]) -> None:
    """`frameloom WORDS`, as the installed command runs it."""
    from frameloom.cli.main import main

    sys.argv = ["frameloom", *words]
    main()


def serve() -> None:
    install()
    for name in WARM:
        importlib.import_module(name)
    print(json.dumps({"ready": True}), flush=True)
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            pid = os.fork()
            if pid == 0:
                be_child(request)
            running.add(pid)
            answer: dict[str, Any] = {"pid": pid}
        else:
            code = poll(request["pid"]) if request["do"] == "poll" else wait_for(request["pid"], request["limit_s"])
            running -= set() if request["do"] == "poll" and code is None else {request["pid"]}
            answer = {"code": code}
        print(json.dumps(answer), flush=True)
    for pid in running:
        end(pid)


def be_child(request: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        # Both may be one file, so each writes at its end.
        for stream, path in ((1, request["log"]), (2, request["errors"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request.get("cwd", "."))
        module, _, function = request["call"].partition(":")
        getattr(importlib.import_module(module), function)(*request["args"])
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def poll(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def wait_for(pid: int, limit_s: float) -> int | None:
    deadline, pause_s = time.monotonic() + limit_s, 0.0005
    while True:
        code = poll(pid)
        if code is not None:
            return code
        if time.monotonic() > deadline:
            end(pid)
            return None
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.02)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    serve()
