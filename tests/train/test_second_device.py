"""Every tensor of a run is where a GPU needs it: on a device that is not the host, runs learn what they learn there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TWINS = [
    "sdxl/multi-aspect",
    "cogvideox_fun/2b-inpaint",
    "opensora2/stage1-i2v",
    "opensora_plan/wfvae-stage3",
]


@pytest.fixture(scope="module")
def found(shared_world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In a process of its own: a second device changes torch for good."""
    folder = tmp_path_factory.mktemp("devices")
    words = ["-m", "tests.train.second_device_worker", shared_world / "data" / "manifest.parquet", folder, *TWINS]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads((folder / "found.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_a_run_learns_and_samples_on_another_device(found: dict[str, Any], name: str) -> None:
    here, there = found[f"{name} cpu"], found[f"{name} second"]
    assert (here["devices"], there["devices"]) == (["cpu"], ["second"])
    assert there["losses"] == pytest.approx(here["losses"], rel=1e-3) and len(there["losses"]) > 2
    assert there["samples"] == here["samples"] and bool(there["samples"]) == ("wfvae" not in name)
