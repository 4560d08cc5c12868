"""The report of the simulated cluster."""

from __future__ import annotations

import json

from frameloom.bench import cluster


def test_the_report_has_a_line_for_each_size_and_nothing_wrong(monkeypatch):
    monkeypatch.setattr(cluster, "_STEPS", 10)
    monkeypatch.setattr(cluster, "_SIZES", {16: (16, 12), 64: (64,)})
    found = cluster.compare_cluster(3)
    lines = found.describe()
    assert len(lines) == 3 and "16 processes" in lines[1] and "s per 10,000 steps" in lines[2]
    assert json.loads(json.dumps(found.to_json()))["64"]["problems"] == []
    assert all(report.num_steps >= 30 for report in found.reports.values())
