"""`frameloom data shapes`, run as a person would run it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.faults.warm import run_frameloom


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return run_frameloom("data", "shapes", *words)


def test_command_writes_a_set_and_says_so(tmp_path: Path) -> None:
    done = run(str(tmp_path / "set"), "--count", "10", "--seed", "2")
    assert done.returncode == 0, done.stderr
    assert "8 videos and 2 images" in done.stdout
    assert (tmp_path / "set" / "manifest.parquet").is_file()


def test_command_refuses_a_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = run(str(tmp_path), "--count", "10")
    assert done.returncode == 2
    assert "notes.txt" in done.stderr
    assert "Traceback" not in done.stderr
