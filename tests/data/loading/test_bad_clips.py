"""The list of unreadable clips counts rows, survives a kill, and ends the run over its limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frameloom.core.errors import DataError
from frameloom.data.loading.bad_clips import BadClipLog, read_bad_clips
from frameloom.data.loading.batch import BadClip
from frameloom.data.manifest.manifest import Manifest


def bad_clips(manifest: Manifest, *rows: int, epoch: int = 0) -> list[BadClip]:
    return [BadClip(row, manifest.clip(row).path, f"{manifest.clip(row).path}: broken", epoch, row) for row in rows]


def test_bad_clip_log_counts_rows_and_stops_over_the_limit(manifest: Manifest, tmp_path: Path) -> None:
    log = BadClipLog(tmp_path / "bad_clips.jsonl", num_clips=100, limit=0.02)
    log.add(bad_clips(manifest, 0, 1))
    log.add(bad_clips(manifest, 0, epoch=1))
    assert log.num_bad == 2
    with pytest.raises(DataError, match="3 of 100 clips cannot be read, over the limit of 2%") as caught:
        log.add(bad_clips(manifest, 2))
    assert "c.mp4: broken" in str(caught.value)
    lines = [json.loads(line) for line in (tmp_path / "bad_clips.jsonl").read_text().splitlines()]
    assert [(line["row"], line["epoch"], line["path"]) for line in lines] == [
        (0, 0, "a.mp4"),
        (1, 0, "b.mp4"),
        (0, 1, "a.mp4"),
        (2, 0, "c.mp4"),
    ]


def test_resumed_log_lists_nothing_twice(manifest: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "bad_clips.jsonl"
    BadClipLog(path, num_clips=100, limit=0.5).add(bad_clips(manifest, 0, 1))
    with path.open("a") as file:
        file.write('{"row": 2, "pa')
    log = BadClipLog(path, num_clips=100, limit=0.5)
    assert log.num_bad == 2
    log.add(bad_clips(manifest, 0, 1, 2))
    assert log.num_bad == 3
    assert len(path.read_text().splitlines()) == 3
    path.write_text("nonsense\n")
    with pytest.raises(DataError, match="not a list of bad clips, line 1"):
        BadClipLog(path, num_clips=100, limit=0.5)


def test_a_list_that_is_being_written_is_read_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "bad_clips.jsonl"
    record = {"row": 7, "path": "a.mp4", "reason": "broken", "epoch": 1, "ordinal": 3}
    path.write_text(json.dumps(record) + "\n" + json.dumps(record)[:20])
    before = path.read_bytes()
    assert read_bad_clips(path) == [BadClip(**record)]
    assert path.read_bytes() == before and read_bad_clips(tmp_path / "none.jsonl") == []
