"""Each format holds all frames and says how it was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.data.media.decode import probe_clip
from frameloom.sampling.batch import sample_many
from frameloom.sampling.outputs import read_about, read_frames
from tests.sampling.conftest import ALONE, Load


@pytest.mark.parametrize("format", ["mp4", "webm", "gif", "png"])
def test_each_format_holds_all_frames_and_says_how_it_was_made(load: Load, tmp_path: Path, format: str) -> None:
    sampler = load("latte", format=format, frames=5, steps=2)
    (path,) = sample_many(sampler, [sampler.request('say "hi"; ünïcode ' + "long " * 90, 5)], tmp_path, ALONE)
    frames, about = read_frames(path), read_about(path)
    assert frames.shape == (5, 32, 48, 3) and (path.is_dir() if format == "png" else path.suffix == f".{format}")
    assert about["prompt"].startswith('say "hi"; ünïcode') and about["seed"] == "5"
    assert about["sample.steps"] == "2" and len(about["weights"]) == len(about["recipe"]) == 64
    if format in ("mp4", "webm"):
        assert probe_clip(path).fps == 8
    exact = read_frames(sample_many(sampler, [sampler.request("x", 5, format="png")], tmp_path, ALONE)[0])
    assert exact.shape == frames.shape
