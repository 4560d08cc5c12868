"""Real processes over gloo: a list of jobs is run by four of them, each in a world of one, two, three or four."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.ports import free_ports

WORKER = Path(__file__).with_name("worker.py")
LIMIT_S = 1500


@dataclasses.dataclass
class Jobs:
    """Settings to run with several processes; `run` does all that were added."""

    folder: Path
    jobs: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, name: str, world: int, recipe: Path, *overrides: str, kind: str = "steps", **more: Any) -> None:
        job = {"steps": 4, "fault": None, "overrides_of": {}, "out": str(self.folder / name)}
        # Steps depend on no other job: of those with one or two processes several run at once.
        first = len(self.jobs) * world % 4 if kind == "steps" and world < 3 else 0
        job |= {"processes": list(range(first, first + world)), **more}
        job |= {"kind": kind, "recipe": str(recipe), "overrides": list(overrides)}
        self.jobs.append(job)

    def run(self) -> list[int]:
        """Exit codes of the processes."""
        for job, port in zip(self.jobs, free_ports(len(self.jobs)), strict=True):
            job["port"] = port
        file = self.folder / "jobs.json"
        file.write_text(json.dumps(self.jobs))
        number = 1 + max(max(job["processes"]) for job in self.jobs)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-W", "ignore::FutureWarning", str(WORKER), str(file)]
        with ExitStack() as files:
            started = []
            for index in range(number):
                errors = files.enter_context((self.folder / f"err-{index}").open("w"))
                started.append(subprocess.Popen([*command, str(index)], env=environment, stderr=errors))
            try:
                return wait_for(started)
            finally:
                for process in started:
                    process.kill()
                    process.wait()

    def found(self, name: str) -> Found:
        job = next(job for job in self.jobs if job["out"] == str(self.folder / name))
        return Found(Path(job["out"]), len(job["processes"]))

    def errors(self, index: int = 0) -> str:
        return (self.folder / f"err-{index}").read_text()


@dataclasses.dataclass
class Found:
    """What a job of kind `steps` has put down."""

    folder: Path
    world: int

    def __post_init__(self) -> None:
        self.ranks = [json.loads((self.folder / f"rank-{rank}.json").read_text()) for rank in range(self.world)]

    def losses(self, key: str = "loss") -> list[float]:
        return [values[key] for values in self.ranks[0]["values"]]

    def rows(self) -> list[list[int]]:
        """Rows of each step, of all processes."""
        steps = range(len(self.ranks[0]["rows"]))
        return [sorted(row for rank in self.ranks for row in rank["rows"][step]) for step in steps]

    def tensors(self, kind: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{kind}.st")


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours if ours[name].numel())


def wait_for(started: list[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes; when one process fails by a mistake of ours, the others are not waited for."""
    deadline = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process in started) and time.monotonic() < deadline:
        if any(process.poll() not in (None, 0, -signal.SIGKILL) for process in started):
            time.sleep(5)
            break
        time.sleep(0.1)
    return [-1 if process.poll() is None else process.returncode for process in started]
