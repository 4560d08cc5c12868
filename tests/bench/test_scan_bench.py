"""The scan benchmark measures what it says, on a small clip; its numbers are for `frameloom bench`."""

from __future__ import annotations

from pathlib import Path

from frameloom.bench.scan import compare_scan, write_moving_texture
from frameloom.data.probe import probe_header


def test_headers_are_much_cheaper_than_decoding(tmp_path: Path) -> None:
    clip = write_moving_texture(tmp_path / "clip.mp4", frames=60, height=180, width=320)
    facts = probe_header(clip)
    assert (facts.frames, facts.height, facts.width, facts.fps) == (60, 180, 320, 30.0)
    found = compare_scan(3, clip=clip)
    assert found.num_frames == 60
    assert found.ratio > 5
    assert found.to_json()["ratio"] == found.ratio
