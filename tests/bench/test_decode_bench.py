"""The comparison compares like with like, and decodes no more than it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from frameloom.bench.decode import compare_decode, decode_then_resize
from frameloom.bench.scan import write_moving_texture
from frameloom.core.errors import DataError
from frameloom.data.decode import read_clip


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moving_texture(tmp_path_factory.mktemp("bench") / "clip.mp4", frames=120, height=384, width=672)


def test_both_ways_give_the_same_frames(clip: Path) -> None:
    indices = np.arange(60, 66)
    ours_CFHW = read_clip(clip, indices=indices, height=384, width=672).float() / 127.5 - 1
    theirs_CFHW = decode_then_resize(clip, indices, 384, 672)
    neighbours_CFHW = decode_then_resize(clip, indices + 8, 384, 672)
    # Colour edges differ by the filter of the conversion; other frames differ far more.
    assert (ours_CFHW - theirs_CFHW).abs().mean() < 0.1
    assert (ours_CFHW - neighbours_CFHW).abs().mean() > 0.3


def test_a_window_is_measured_and_decoded_from_its_key_frame(clip: Path) -> None:
    found = compare_decode(3, clips=[clip])
    (case,) = found.cases
    assert (case.num_wanted, case.num_frames) == (33, 120)
    assert case.num_decoded < 90
    assert case.cpu_ratio > 0
    assert "as fast" in "\n".join(found.describe())
    assert found.to_json()["cases"][0]["ratio"] == case.ratio


def test_a_clip_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = write_moving_texture(tmp_path / "short.mp4", frames=8, height=64, width=64)
    with pytest.raises(DataError, match="8 frames; the comparison needs at least 33"):
        compare_decode(3, clips=[path])
