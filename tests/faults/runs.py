"""What a run folder tells after the fact, without the clock."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

from frameloom.checkpoint.reader import list_steps, read_state, step_folder

TIMING = {"train/steps_per_s", "train/tokens_per_s"}


def metrics(run: Path) -> list[dict[str, float]]:
    """Everything that was logged, without the clock."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMING} for record in records]


def losses(run: Path) -> dict[int, float]:
    return {int(record["step"]): record["train/loss"] for record in metrics(run) if "train/loss" in record}


def digests(run: Path, step: int) -> dict[str, str]:
    """What a step holds, as digests: weights, average, optimizer."""
    return dict(read_state(step_folder(run / "checkpoints", step))["files"])


def stop_after(run: Path, step: int, target: Path) -> None:
    """A copy of a run as a kill right after `step` was saved would have left it, with metrics a little ahead."""
    shutil.copytree(run, target)
    shutil.rmtree(target / "export")
    for later in list_steps(target / "checkpoints"):
        if later > step:
            shutil.rmtree(step_folder(target / "checkpoints", later))


def count_records(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def wait_for_records(run: Path, count: int, limit_s: float = 240.0) -> None:
    deadline = time.monotonic() + limit_s
    while count_records(run) < count:
        assert time.monotonic() < deadline, f"no {count} records of {run} after {limit_s} s"
        time.sleep(0.002)


def train_in_own_folder(folder: str, words: list[str]) -> None:
    """`frameloom train` in a working folder of this rank, as on machines that share no files."""
    from tests.faults.warm import run_command

    os.chdir(Path(folder) / f"rank-{os.environ['RANK']}")
    run_command(["train", *words])
