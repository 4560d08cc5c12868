"""A side elsewhere has a process of its own, is timed there, and its failure is told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.harness import IsolatedProcess, Work, take_turns


def build_burn(log: Path, amount: int) -> Work:
    def burn() -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        sum(number * number for number in range(amount))

    return burn


def build_failure() -> Work:
    raise ValueError("cannot be built")


@pytest.fixture(scope="module")
def isolated() -> Iterator[IsolatedProcess]:
    with IsolatedProcess() as isolated:
        yield isolated


def test_a_side_is_run_and_timed_in_another_process(isolated: IsolatedProcess, tmp_path: Path) -> None:
    much = isolated.build(build_burn, tmp_path / "much", 3_000_000)
    times = take_turns({"here": build_burn(tmp_path / "here", 10), "much": much}, 2)
    pids = {name: set((tmp_path / name).read_text().split()) for name in times}
    assert pids["here"] == {str(os.getpid())} and len(pids["much"]) == 1 and pids["here"] != pids["much"]
    assert len((tmp_path / "much").read_text().split()) == 3, "one turn that warms up and two that count"
    assert times["much"].cpu_s > 0.02 > times["here"].cpu_s


def test_a_side_takes_the_place_of_the_one_before(isolated: IsolatedProcess, tmp_path: Path) -> None:
    isolated.build(build_burn, tmp_path / "first", 10)
    isolated.build(build_burn, tmp_path / "second", 10).time()
    assert not (tmp_path / "first").exists() and (tmp_path / "second").is_file()


def test_a_side_that_cannot_be_built_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with IsolatedProcess() as isolated, pytest.raises(RuntimeError, match="ended with exit code 1"):
        isolated.build(build_failure)
    assert "ValueError: cannot be built" in capfd.readouterr().err


HOLDER = """
import sys
from pathlib import Path
from benchmarks.harness import IsolatedProcess
from tests.benchmarks.test_isolated_process import build_burn

if __name__ == "__main__":
    with IsolatedProcess() as isolated:
        isolated.build(build_burn, Path(sys.argv[1]), 10**12).time()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_killed_bench_leaves_no_process_behind(tmp_path: Path) -> None:
    script, pids = tmp_path / "holder.py", tmp_path / "pids"
    script.write_text(HOLDER)
    root = Path(__file__).parents[2]
    command = [sys.executable, str(script), str(pids)]
    with subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}) as holder:
        wait_until(lambda: pids.exists() and bool(pids.read_text()), 60)
        child = Path("/proc") / pids.read_text().strip() / "stat"
        assert runs(child)
        holder.kill()
    wait_until(lambda: not runs(child), 10)


def wait_until(is_so: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(stat: Path) -> bool:
    """A process that has ended may wait for somebody to ask how."""
    try:
        return stat.read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False
