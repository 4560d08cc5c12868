"""FVD through a real tiny video network, against that network called by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import VideoMAEImageProcessorPil, VideoMAEModel

from frameloom.core.errors import CheckpointError, DataError
from frameloom.core.random import numpy_stream
from frameloom.data.loading.clip_view import ClipView, list_clips
from frameloom.data.media.writing import write_video
from frameloom.evaluate.comparison import Distances, compare_sets, pair_clips
from frameloom.evaluate.networks import load_video_network
from frameloom.evaluate.pair_metrics import Measures
from tests.evaluate.networks import make_videomae, make_vit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_videomae(tmp_path_factory.mktemp("videomae"))


def draw_clip(number: int, speed: int) -> np.ndarray:
    """A bright bar that moves by `speed` pixels a frame over a slope of its own."""
    frames = np.zeros((7, 24, 32, 3), np.uint8)
    frames[..., 2] = numpy_stream(0, "slope", number).integers(40, 200)
    for index, frame in enumerate(frames):
        left = (4 + number + speed * index) % 24
        frame[6:18, left : left + 6] = (220, 180, 40)
    return frames


def write_clips(folder: Path, speed: int, num_clips: int = 5) -> Path:
    for number in range(num_clips):
        write_video(folder / f"{number}.mp4", draw_clip(number, speed), 8)
    return folder


def test_features_are_those_of_the_network_itself(folder: Path) -> None:
    frames_FHWC = draw_clip(0, 2)
    found = load_video_network(folder).encode_clip(torch.from_numpy(frames_FHWC).permute(3, 0, 1, 2))
    taken = [Image.fromarray(frames_FHWC[index]) for index in (0, 2, 4, 6)]
    values = VideoMAEImageProcessorPil.from_pretrained(folder)(taken, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        wanted = VideoMAEModel.from_pretrained(folder).eval()(pixel_values=values).last_hidden_state.mean(1)[0]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_fvd_is_zero_for_one_set_and_grows_with_the_difference_of_motion(folder: Path, tmp_path: Path) -> None:
    slow, faster, fast = (write_clips(tmp_path / str(speed), speed) for speed in (0, 1, 3))
    distances = Distances(network=load_video_network(folder))

    def fvd(other: Path) -> float:
        pairs = pair_clips(list_clips(slow), list_clips(other), "none")
        table = compare_sets(pairs, Measures({}), view=ClipView(), distances=distances)
        assert table.more["fvd_clips"] == 5 and any("I3D" in note for note in table.notes)
        return float(table.more["fvd"])

    assert fvd(slow) == pytest.approx(0, abs=1e-4)
    assert 1e-3 < fvd(faster) < fvd(fast)


def test_pictures_and_other_networks_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no place in FVD"):
        load_video_network(folder).encode_clip(torch.zeros(3, 1, 24, 24, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="does not take clips"):
        load_video_network(make_vit(tmp_path / "vit"))
    with pytest.raises(CheckpointError, match="video network"):
        load_video_network(tmp_path)
