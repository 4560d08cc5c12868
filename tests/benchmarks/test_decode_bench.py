"""The comparison compares like with like: every reader gives the same frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.decode import WAYS, measure, write_moving_texture
from benchmarks.harness import BenchSettings
from frameloom.core.errors import DataError
from frameloom.data.media.decode import read_clip


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moving_texture(tmp_path_factory.mktemp("bench") / "clip.mp4", frames=120, height=384, width=672)


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_give_the_same_frames(clip: Path, way: str) -> None:
    for package in ("decord", "cv2"):
        if package in way.lower().replace("opencv", "cv2"):
            pytest.importorskip(package)
    indices = np.arange(60, 66)
    ours_CFHW = read_clip(clip, indices=indices, height=384, width=672).float() / 127.5 - 1
    theirs_CFHW = WAYS[way](clip, indices, 384, 672)
    neighbours_CFHW = WAYS[way](clip, indices + 8, 384, 672)
    # Colour edges differ by the filter of the conversion; other frames differ far more.
    assert (ours_CFHW - theirs_CFHW).abs().mean() < 0.1
    assert (ours_CFHW - neighbours_CFHW).abs().mean() > 0.3


def test_a_window_of_a_given_clip_is_decoded_from_its_key_frame(clip: Path) -> None:
    rows = list(measure(BenchSettings(1), clips=[clip]))
    assert len(rows) == len(WAYS) and rows[0].name == "clip.mp4, 33 of 120 frames"
    assert int(rows[0].note.split()[0]) < 90
    assert rows[0].ratio is not None and rows[0].ratio > 0


def test_a_clip_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = write_moving_texture(tmp_path / "short.mp4", frames=8, height=64, width=64)
    with pytest.raises(DataError, match="8 frames; the comparison needs at least 33"):
        list(measure(BenchSettings(1), clips=[path]))
