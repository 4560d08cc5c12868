"""Every tensor of a run is where a GPU needs it: on a device that is not the host, runs learn what they learn there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TWINS = [
    "sdxl/multi-aspect",
    "cogvideox_fun/2b-inpaint",
    "opensora2/stage1-i2v",
    "opensora_plan/wfvae-stage3",
]


@pytest.mark.slow
def test_runs_learn_and_sample_on_another_device(shared_world: Path, tmp_path: Path) -> None:
    """In a process of its own: a second device changes torch for good."""
    words = ["-m", "tests.training.second_device_worker", shared_world / "data" / "manifest.parquet", tmp_path, *TWINS]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for name in TWINS:
        here, there = found[f"{name} cpu"], found[f"{name} second"]
        assert (here["devices"], there["devices"]) == (["cpu"], ["second"]), name
        assert there["losses"] == pytest.approx(here["losses"], rel=1e-3) and len(there["losses"]) > 2, name
        assert there["samples"] == here["samples"] and bool(there["samples"]) == ("wfvae" not in name), name
