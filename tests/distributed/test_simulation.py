"""Thousands of virtual processes: equal step counts, disjoint samples, failures, changes of size."""

from __future__ import annotations

import logging

import pytest

from tests import simulation
from tests.simulation import Cluster, Scenario, simulate


@pytest.mark.parametrize("sizes", [(512, 500, 64), (4096, 4088, 512)])
def test_a_large_cluster_loses_nothing_through_failures_and_changes_of_size(tmp_path, caplog, sizes):
    caplog.set_level(logging.ERROR)
    scenario = Scenario(
        sizes=sizes, num_rows=sizes[0] * 60, num_steps=80, save_every=5, failures=0.08, damaged_saves=0.2, dissents=0.05
    )
    report = simulate(scenario, tmp_path)
    assert not report.problems
    assert report.num_epochs >= 2 and report.num_failures >= 3 and report.num_damaged >= 1 and report.num_repeated > 0
    assert report.num_found == report.num_dissents >= 1
    assert report.num_steps == 80 + report.num_repeated + report.num_failures + report.num_found


def test_a_resume_that_forgets_its_position_is_noticed(tmp_path, monkeypatch, caplog):
    """The control: without the position, samples come twice."""
    caplog.set_level(logging.ERROR)
    resume = Cluster.resume

    def forget(cluster: Cluster) -> None:
        resume(cluster)
        cluster.position = 0

    monkeypatch.setattr(Cluster, "resume", forget)
    scenario = Scenario(sizes=(64, 48), num_rows=20_000, num_steps=300, save_every=5, failures=0.02, dissents=0.0)
    assert "twice or lost" in simulate(scenario, tmp_path).problems[0]


def test_a_vote_that_ignores_claims_is_noticed(tmp_path, monkeypatch):
    """The control: a count that always agrees."""
    check = simulation.check_words
    monkeypatch.setattr(simulation, "check_words", lambda total, ranks: check([0.0] * len(total), ranks))
    scenario = Scenario(sizes=(64,), num_rows=20_000, num_steps=50, failures=0.0, dissents=0.2)
    assert "the vote says True" in simulate(scenario, tmp_path).problems[0]
