"""All settings and runs of these tests, done once for a session, however many test processes there are."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from tests.distributed.jobs import Jobs
from tests.distributed.settings import add_judged, add_runs, add_settings


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory, shared_world: Path) -> Jobs:
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "several processes"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = Jobs(folder)
        if (folder / "done.json").is_file():
            jobs.jobs = json.loads((folder / "done.json").read_text())
            return jobs
        add_settings(jobs, shared_world)
        add_judged(jobs, shared_world)
        add_runs(jobs, shared_world)
        codes = jobs.run()
        # The second one is killed by its last run.
        assert codes == [0, -9, 0, 0], jobs.errors()
        (folder / "done.json").write_text(json.dumps(jobs.jobs))
    return jobs
