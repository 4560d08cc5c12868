"""Fault 28 with two processes: one of them runs out of memory, and both take halves from then on, or stop together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frameloom.checkpoint.reader import load_latest
from frameloom.training.memory.oom_split import NOTES, read_notes
from tests.distributed.jobs import Jobs
from tests.distributed.settings import write_recipe
from tests.faults.injection import VARIABLE

pytestmark = pytest.mark.timeout(1200)
LONG = "64px 9f 3:2"
FAULT = {"point": "pass", "act": "memory", "rank": 1, "bucket": LONG, "samples_over": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, shared_world: Path) -> Jobs:
    """A process alone, which has rank 0 and never fails; two that compute apart; two that compute together.

    Of the last, "known" finds the note of an earlier start, and "together" fails, which ends its processes.
    """
    jobs = Jobs(tmp_path_factory.mktemp("memory"))
    path = write_recipe(jobs, shared_world, "runs")

    def whole(name: str, world: int, run: str, *overrides: str) -> None:
        jobs.add(name, world, path, "--name", run, "--train.steps", "4", *overrides, kind="whole")

    whole("alone", 1, "alone")
    whole("apart", 2, "apart", "--train.preflight", "true")
    note = jobs.folder / "runs" / "known" / NOTES / "rank-1.json"
    note.parent.mkdir(parents=True)
    note.write_text(json.dumps({"step": 1, "most": {LONG: 2}}))
    whole("known", 2, "known", "--parallel.zero", "3")
    whole("together", 2, "together", "--parallel.zero", "3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, json.dumps([FAULT]))
        assert jobs.run() == [0, 0], jobs.errors() + jobs.errors(1)
    return jobs


def losses(jobs: Jobs, run: str) -> list[float]:
    lines = (jobs.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines]


def outcomes(jobs: Jobs, name: str) -> list[str]:
    return [(jobs.folder / name / f"outcome-{rank}").read_text() for rank in (0, 1)]


def halved(jobs: Jobs, run: str) -> dict[str, int]:
    last = load_latest(jobs.folder / "runs" / run / "checkpoints")
    assert last is not None
    return dict(last.state["halved"])


def test_processes_that_compute_apart_agree_on_halves(runs: Jobs) -> None:
    assert outcomes(runs, "apart") == ["done", "done"]
    assert halved(runs, "apart") == {LONG: 2} and halved(runs, "alone") == {}
    assert losses(runs, "apart") == pytest.approx(losses(runs, "alone"), rel=1e-6)


def test_processes_that_compute_together_stop_and_leave_a_note(runs: Jobs) -> None:
    """No process waits for ever in a gathering that another one has left."""
    first, second = outcomes(runs, "together")
    assert first.startswith("silent") and second.startswith(f"RunError 75: rank 1: bucket {LONG}: 3 samples")
    last = load_latest(runs.folder / "runs" / "together" / "checkpoints")
    assert last is not None and read_notes(runs.folder / "runs" / "together", after_step=last.step) == {LONG: 2}


def test_processes_that_compute_together_take_as_many_passes_each(runs: Jobs) -> None:
    """A pass that one process needs more than its mate, the mate fills up: both gather weights equally often."""
    assert outcomes(runs, "known") == ["done", "done"] and halved(runs, "known") == {LONG: 2}
    assert losses(runs, "known") == pytest.approx(losses(runs, "alone"), rel=1e-6)
