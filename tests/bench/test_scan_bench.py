"""The scan benchmark measures what it says, on a small clip; its numbers are for `frameloom bench`."""

from __future__ import annotations

from pathlib import Path

from frameloom.bench.scan import compare_scan, write_moving_texture
from frameloom.data.probe import probe_header


def test_every_clip_is_measured_both_ways(tmp_path: Path) -> None:
    clip = write_moving_texture(tmp_path / "clip.mp4", frames=60, height=180, width=320)
    facts = probe_header(clip)
    assert (facts.frames, facts.height, facts.width, facts.fps) == (60, 180, 320, 30.0)
    found = compare_scan(3, clips=[clip, clip])
    assert [case.num_frames for case in found.cases] == [60, 60]
    assert all(case.ratio == case.decode_s / case.header_s > 0 for case in found.cases)
    assert "clip.mp4: 60 frames" in "\n".join(found.describe())
