"""Many requests in one folder: none is made twice, and each has a file of its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from frameloom.data.loading.clip_view import list_clips
from frameloom.data.media.writing import CONTACT_SHEET
from frameloom.evaluate.sample_sets import find_prompts
from frameloom.sampling.batch import LOG, sample_many
from frameloom.sampling.outputs import read_frames
from tests.sampling.conftest import ALONE, Load


def test_done_requests_are_kept_and_damaged_ones_made_again(load: Load, tmp_path: Path) -> None:
    sampler = load("latte", steps=1, frames=1)
    requests = [sampler.request(f"prompt {number}", number) for number in range(3)]
    paths = sample_many(sampler, requests[:2], tmp_path, ALONE)
    before = {path: path.stat().st_mtime_ns for path in paths}
    paths[0].write_bytes(b"damaged")
    # A process that was killed while it wrote a line.
    with (tmp_path / LOG).open("a") as file:
        file.write('{"file": "x')
    again = sample_many(sampler, requests, tmp_path, ALONE)
    assert again[1] == paths[1] and again[1].stat().st_mtime_ns == before[paths[1]]
    assert again[0] != paths[0] and read_frames(again[0]).shape == (1, 32, 48, 3)
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["prompt 0", "prompt 1", "prompt 2"]
    other = sample_many(sampler, [sampler.request("prompt 1", 1, steps=2)], tmp_path, ALONE)
    assert other != again[1:2]
    assert sample_many(sampler, [requests[1], requests[1]], tmp_path, ALONE) == [paths[1]] * 2
    assert sample_many(sampler, requests[1:2], tmp_path, ALONE, again=True) != [paths[1]]


def test_rows_that_differ_in_their_name_alone_are_files_of_their_own(load: Load, tmp_path: Path) -> None:
    sampler = load("latte", steps=1, frames=1)
    paths = sample_many(sampler, [sampler.request("a boat", 1, name=name) for name in ("x", "y")], tmp_path, ALONE)
    assert [path.name for path in paths] == ["x-seed1.png", "y-seed1.png"]
    assert np.array_equal(*(read_frames(path) for path in paths))
    before = paths[1].stat().st_mtime_ns
    renamed = sample_many(sampler, [sampler.request("a boat", 1, name=name) for name in ("z", "y")], tmp_path, ALONE)
    assert [path.name for path in renamed] == ["z-seed1.png", "y-seed1.png"]
    assert paths[1].stat().st_mtime_ns == before


def test_the_contact_sheet_is_no_clip_of_a_folder_of_samples(load: Load, tmp_path: Path) -> None:
    pipeline = load("latte", steps=1, frames=1)
    requests = [pipeline.request("a boat", 1), pipeline.request("a car", 2)]
    paths = sample_many(pipeline, requests, tmp_path / "out", ALONE)
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    clips = list_clips(tmp_path / "out")
    assert [clip.name for clip in clips] == [path.name for path in paths]
    assert list(find_prompts(clips, tmp_path / "prompts.txt").values()) == ["one", "two"]
    assert [clip.name for clip in list_clips(tmp_path / "out" / CONTACT_SHEET)] == [CONTACT_SHEET]
