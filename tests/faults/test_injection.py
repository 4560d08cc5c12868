"""Faults strike where a test asked for them and nowhere else, and never without the injector."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from frameloom.core.hooks import notify, observers
from tests.conftest import World
from tests.faults.injection import VARIABLE, install, strike_at

ROOT = Path(__file__).parents[2]


def ask(monkeypatch: pytest.MonkeyPatch, **fault: object) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps([{"point": "pass", "message": "on purpose", **fault}]))


def test_nothing_happens_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    assert observers.count(strike_at) == 1
    for empty in (None, ""):
        monkeypatch.delenv(VARIABLE, raising=False) if empty is None else monkeypatch.setenv(VARIABLE, empty)
        notify("pass", step=3, rank=0)


@pytest.mark.parametrize(
    ("fault", "strikes"),
    [
        ({}, True),
        ({"step": 3}, True),
        ({"step": 4}, False),
        ({"step": [2, 3]}, True),
        ({"rank": 1, "step": 3}, False),
        ({"bucket": "64px"}, True),
        ({"samples_over": 3}, True),
        ({"samples_over": 4}, False),
        ({"no such fact": 1}, False),
        ({"nothing_over": 1}, False),
        ({"point": "save"}, False),
    ],
)
def test_a_fault_strikes_where_all_it_names_agrees(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, object], strikes: bool
) -> None:
    ask(monkeypatch, **fault)
    try:
        notify("pass", step=3, rank=0, bucket="64px", samples=4)
    except RuntimeError as error:
        assert strikes and str(error) == "on purpose"
    else:
        assert not strikes


def test_kinds_of_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, act="memory")
    with pytest.raises(MemoryError):
        notify("pass")
    ask(monkeypatch, act="slow", seconds=0)
    notify("pass")
    ask(monkeypatch, act="explode")
    with pytest.raises(ValueError, match="not kill, stop, slow, memory or raise"):
        notify("pass")


@pytest.mark.parametrize(("module", "code"), [("tests.faults.injection", -signal.SIGKILL), ("frameloom", 0)])
def test_the_program_itself_knows_no_faults(world: World, module: str, code: int) -> None:
    """The same command and environment, with the injector and without."""
    fault = json.dumps([{"point": "save", "step": 1, "act": "kill"}])
    words = ["train", str(world.write_recipe()), "--train.steps", "1", "--train.save_every", "1"]
    env = {**os.environ, VARIABLE: fault, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", module, *words], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
