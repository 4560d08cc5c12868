"""Recorded steps: a trace that opens, with the steps asked for and nothing else."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from frameloom.config.schema.training import ProfileSection
from frameloom.training.logging.profiling import StepProfiler
from frameloom.training.train import train


def test_a_run_writes_a_trace_of_the_steps_asked_for(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    data = {"buckets": {"_delete_": True, "64px": {"1": [1.0, 1]}}}
    with caplog.at_level(logging.INFO, logger="frameloom"):
        run = train(world.recipe("--train.profile", "{start: 2, steps: 2}", data=data))
    assert [path.name for path in (run / "profile").iterdir()] == ["steps-00000002-00000003.json"]
    trace = json.loads((run / "profile" / "steps-00000002-00000003.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    updates = [name for name in names if name.startswith("Optimizer.step#")]
    assert len(updates) == 2 and any("backward" in name.lower() for name in names)
    assert any(name == "[memory]" for name in names)
    table = caplog.text.split("ui.perfetto.dev")[1]
    assert "own ms" in table and "aten::" in table and "%" in table


def test_a_run_that_is_asked_for_no_trace_writes_none(world: Any) -> None:
    assert not (train(world.recipe("--train.steps", "1")) / "profile").exists()


def test_a_recording_that_is_cut_short_is_dropped(tmp_path: Any) -> None:
    profiler = StepProfiler(ProfileSection(start=1, steps=3, memory=False), tmp_path / "profile")
    profiler.note(0)
    profiler.note(1)
    profiler.close()
    profiler.note(3)  # what a resumed run would count; the first step of the recording is gone
    assert not (tmp_path / "profile").exists()
