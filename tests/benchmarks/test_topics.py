"""Every comparison runs on small inputs, and one that dies or hangs is told in a row."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import BenchSettings, Row
from benchmarks.topics import TOPICS, measure_here, run_apart
from tests.benchmarks.children import send_one_and_die, send_one_and_hang

ROOT = Path(__file__).parents[2]
# Imports the topic from a folder with the two packages and no tests beside them.
OUTSIDE = """
import sys
from pathlib import Path

sys.path[:] = [".", *(path for path in sys.path if not (Path(path) / "tests" / "simulation.py").exists())]
from benchmarks.harness import BenchSettings
from benchmarks.topics import measure_here

print(list(measure_here("cluster", BenchSettings(1, is_quick=True))))
"""


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_the_command_has_help_and_its_flags() -> None:
    done = call("-m", "benchmarks", "--help")
    assert done.returncode == 0 and "python -m benchmarks step decode --rounds 9" in done.stdout
    found = set(re.findall(r"^\s+(--[a-z-]+)(?=\s)", done.stdout, re.MULTILINE))
    assert found - {"--help"} == {"--rounds", "--quick", "--file", "--json", "--page", "--from"}


def test_the_command_measures_in_a_process_of_its_own_and_refuses_what_it_does_not_know() -> None:
    done = call("-m", "benchmarks", "cluster", "--quick", "--rounds", "1")
    assert done.returncode == 0 and "cluster: 10,000 steps of 64 processes" in done.stdout, done.stderr
    wrong = call("-m", "benchmarks", "speed")
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr and wrong.stdout == ""
    assert wrong.stderr.startswith("there is no benchmark 'speed'; choose from: start, model, ")


def test_the_simulated_cluster_needs_a_clone_and_says_so(tmp_path: Path) -> None:
    for package in ("benchmarks", "frameloom"):
        (tmp_path / package).symlink_to(ROOT / package)
    command = [sys.executable, "-c", OUTSIDE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert "RunError: tests/simulation.py is not found; run `python -m benchmarks` from the root" in done.stdout


# The compiler looks at .grad of what a block is given and hides the warning of it, but not where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TOPICS if name != "model"])
def test_a_quick_run_of_every_comparison_gives_numbers(name: str) -> None:
    rows = list(measure_here(name, BenchSettings(1, is_quick=True)))
    assert rows and not [row.problem for row in rows if row.problem]
    assert all(row.topic == name and (row.missing or row.ours is not None) for row in rows)
    for row in rows:
        assert row.missing or row.other is None or (row.ratio is not None and row.ratio > 0 and row.against)


def test_a_process_that_dies_keeps_its_rows_and_tells_its_exit_code() -> None:
    first, second = run_apart(send_one_and_die, (), "step", 60)
    assert first == Row("step", "before") and second.problem == "its process ended with exit code 3"


def test_a_process_that_hangs_is_stopped() -> None:
    found = list(run_apart(send_one_and_hang, (), "step", 8))
    assert found[0] == Row("step", "before") and found[1].problem == "no answer for 8 s; it was stopped"
