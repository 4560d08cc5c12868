"""Faults strike where a test asked for them and nowhere else."""

from __future__ import annotations

import json

import pytest

from frameloom.core.faults import VARIABLE, fail_at


def ask(monkeypatch: pytest.MonkeyPatch, **fault: object) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps([{"point": "pass", "message": "on purpose", **fault}]))


def test_nothing_happens_unless_it_is_asked_for(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    fail_at("pass", step=3, rank=0)


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
def test_a_fault_strikes_where_all_it_names_agrees(monkeypatch, fault, strikes):
    ask(monkeypatch, **fault)
    try:
        fail_at("pass", step=3, rank=0, bucket="64px", samples=4)
    except RuntimeError as error:
        assert strikes and str(error) == "on purpose"
    else:
        assert not strikes


def test_the_rank_is_that_of_the_environment_where_none_is_given(monkeypatch):
    ask(monkeypatch, rank=1)
    fail_at("pass")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RuntimeError, match="on purpose"):
        fail_at("pass")


def test_kinds_of_faults(monkeypatch):
    ask(monkeypatch, act="memory")
    with pytest.raises(MemoryError):
        fail_at("pass")
    ask(monkeypatch, act="slow", seconds=0)
    fail_at("pass")
    ask(monkeypatch, act="explode")
    with pytest.raises(ValueError, match="not kill, stop, slow, memory or raise"):
        fail_at("pass")
