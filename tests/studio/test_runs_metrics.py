"""Metrics are read on from where the last look ended, whatever state the file is in."""

from __future__ import annotations

import json
import math
from pathlib import Path

from frameloom.core.files import write_text
from frameloom.studio.runs.run_list import MetricsTail


def record(step: int, **values: object) -> str:
    return json.dumps({"step": step, **{f"train/{name}": value for name, value in values.items()}}) + "\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_look_reads_only_what_was_added(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, "".join(record(step, loss=step / 2) for step in range(1, 501)))
    tail = MetricsTail(path)
    assert tail.read() and not tail.read()
    before = tail.num_read_bytes
    assert before == path.stat().st_size
    append(path, record(501, loss=7.0))
    assert tail.read()
    assert tail.num_read_bytes - before == len(record(501, loss=7.0))
    assert tail.points("train/loss")[-1] == (501, 7.0)
    assert len(tail.points("train/loss")) == 501 and tail.last_step == 501


def test_half_a_line_counts_once_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = record(3, loss=1.5)
    append(path, record(2, loss=2.0) + line[:9])
    tail = MetricsTail(path)
    tail.read()
    assert tail.last_step == 2
    append(path, line[9:])
    tail.read()
    assert tail.points("train/loss") == [(2, 2.0), (3, 1.5)]


def test_a_resumed_run_that_writes_its_file_anew_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, "".join(record(step, loss=1.0) for step in range(1, 9)))
    tail = MetricsTail(path)
    tail.read()
    write_text(path, record(1, loss=1.0) + record(2, loss=5.0))
    assert tail.read()
    assert tail.points("train/loss") == [(1, 1.0), (2, 5.0)]
    path.unlink()
    assert tail.read() and tail.names() == []


def test_lines_that_are_no_records_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    odd = ["[]", "{", '"x"', '{"step": "1", "a": 1}', '{"step": -1, "a": 1}', '{"step": true, "a": 1}', "\x00\x01"]
    append(path, "\n".join(odd) + "\n" + "x" * (3 << 20) + "\n" + record(4, loss=None, name="text", rate=2))
    tail = MetricsTail(path)
    tail.read()
    assert tail.names() == ["train/loss", "train/rate"] and tail.last_step == 4
    assert math.isnan(tail.points("train/loss")[-1][1]) and tail.points("train/rate") == [(4, 2.0)]


def test_a_file_that_is_not_there_yet_is_no_error(tmp_path):
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    assert not tail.read() and tail.points("train/loss") == []
