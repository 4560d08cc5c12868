"""Facts behind captions: the words of Open-Sora 2.0, the same however a row is asked for."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import polars
import pytest

from frameloom.data.manifest.captions import CaptionSuffix, append_suffix, format_motion, format_rate, join_suffix
from frameloom.data.manifest.manifest import Manifest, shard_manifest, write_manifest

# Frame rates of files and what the original says of them, with a limit of 24.
RATES = {23.976: "23.976", 24.0: "24", 25.0: "12", 29.97: "14", 30.0: "15", 50.0: "16", 60.0: "20", 16.0: "16.0"}
NOTES = CaptionSuffix(fps=True, motion="score_vmafmotion", fps_max=24)


@pytest.mark.parametrize("fps", RATES)
def test_rates_are_spelled_as_in_the_original(fps):
    assert format_rate(fps, 24) == f"{RATES[fps]} FPS"


def test_notes_are_spelled_as_in_the_original():
    assert [format_motion(score) for score in (0.2, 4.5, 5.49, 12)] == [
        f"{score} motion score" for score in (0, 5, 5, 12)
    ]
    assert join_suffix("a boat", NOTES.parts(30.0, 5.2)) == "a boat 15 FPS, 5 motion score."
    assert join_suffix("a boat", NOTES.parts(None, 5.2)) == "a boat 5 motion score."
    assert join_suffix("a boat", NOTES.parts(math.nan, math.nan)) == "a boat"
    assert join_suffix("a boat.", NOTES.parts(24.0, None)) == "a boat. 24 FPS."


@pytest.mark.parametrize("stride, rate, wanted", [(None, 16, "16 FPS"), (3, None, "10 FPS")])
def test_policies_that_set_the_rate_or_a_stride_say_so(stride, rate, wanted):
    notes = CaptionSuffix(True, None, 24, stride, rate)
    assert notes.parts(30.0) == [wanted]


def table(folder: Path) -> polars.DataFrame:
    for name in ("a.mp4", "b.mp4", "c.png"):
        (folder / name).write_bytes(b"")
    return polars.DataFrame(
        {
            "path": ["a.mp4", "b.mp4", "c.png"],
            "caption": ["one", "two", "three"],
            "kind": ["video", "video", "image"],
            "height": [64, 64, 64],
            "width": [64, 64, 64],
            "frames": [30, 30, 1],
            "fps": [30.0, 8.0, None],
            "captions": [["one", "uno"], None, ["three"]],
            "score_vmafmotion": [5.2, None, None],
        }
    )


WANTED = ["one 15 FPS, 5 motion score.", "two 8.0 FPS.", "three"]


@pytest.mark.parametrize("sharded", [False, True])
def test_every_way_to_a_caption_gives_the_same_note(tmp_path, sharded):
    path = tmp_path / "clips.parquet"
    write_manifest(path, table(tmp_path))
    if sharded:
        list(shard_manifest(path, tmp_path / "shards", rows=2))
        path = tmp_path / "shards"
    plain = Manifest.read(path, root=tmp_path)
    noted = append_suffix(plain, NOTES)
    for manifest in (noted, pickle.loads(pickle.dumps(noted))):
        assert manifest.column("caption").to_list() == manifest.captions([0, 1, 2]) == WANTED
        assert [manifest.clip(row).caption for row in range(3)] == WANTED
        assert manifest.all_captions(0) == [WANTED[0], "uno 15 FPS, 5 motion score."]
        assert manifest.all_captions(1) == [WANTED[1]]
        assert manifest.column("captions").to_list()[2] == ["three"]
        assert manifest.column("path").to_list() == plain.column("path").to_list()
    assert plain.captions([0]) == ["one"] and noted.fingerprint != plain.fingerprint
    assert append_suffix(plain, NOTES).fingerprint == noted.fingerprint


def test_a_missing_column_is_told_and_rates_are_said_all_the_same(tmp_path, caplog):
    write_manifest(tmp_path / "clips.parquet", table(tmp_path).drop("score_vmafmotion"))
    noted = append_suffix(Manifest.read(tmp_path / "clips.parquet"), NOTES)
    assert noted.caption(0) == "one 15 FPS." and "no column 'score_vmafmotion'" in caplog.text
