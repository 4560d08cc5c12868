"""Features of frames and clips from real tiny networks, against those networks called by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    VideoMAEImageProcessorPil,
    VideoMAEModel,
    ViTModel,
)

from frameloom.core.errors import CheckpointError, DataError
from frameloom.core.random import numpy_stream, stream
from frameloom.data.loading.clip_view import ClipView, list_clips
from frameloom.data.media.writing import write_video
from frameloom.evaluate.clip_metrics import measure_consistency, measure_text_similarity
from frameloom.evaluate.comparison import Distances, compare_sets, pair_clips
from frameloom.evaluate.networks import load_clip, load_frame_network, load_video_network
from frameloom.evaluate.pair_metrics import Measures
from tests.evaluate.networks import make_clip, make_videomae, make_vit

CAPTION = "a red circle moves left"


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def vit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vit(tmp_path_factory.mktemp("vit"))


def draw_noise(frames: int = 3) -> Tensor:
    return torch.randint(0, 256, (3, frames, 24, 40), generator=stream(0, "test frames"), dtype=torch.uint8)


def by_hand(folder: Path, video: Tensor) -> Tensor:
    pictures = [Image.fromarray(video[:, frame].permute(1, 2, 0).numpy()) for frame in range(video.shape[1])]
    return CLIPImageProcessorPil.from_pretrained(folder)(pictures, return_tensors="pt")["pixel_values"]


def test_clip_similarity_is_that_of_the_model_itself(clip_folder: Path) -> None:
    video, network = draw_noise(), load_clip(clip_folder)
    found = measure_text_similarity(network.encode_frames(video), network.encode_text(CAPTION))
    model = CLIPModel.from_pretrained(clip_folder).eval()
    words = CLIPTokenizer.from_pretrained(clip_folder)([CAPTION], return_tensors="pt")
    with torch.no_grad():
        whole = model(pixel_values=by_hand(clip_folder, video), **words)
        wanted = float((whole.logits_per_image / model.logit_scale.exp()).mean())
    assert found == pytest.approx(wanted, abs=1e-5)
    other = measure_text_similarity(network.encode_frames(video), network.encode_text("two dogs run along the beach"))
    assert abs(other - found) > 1e-3


def test_long_prompts_are_cut_to_the_position_table(clip_folder: Path) -> None:
    network = load_clip(clip_folder)
    long = network.encode_text(" ".join([CAPTION] * 9))
    assert long.isfinite().all() and not torch.equal(long, network.encode_text(CAPTION))


def test_a_vision_network_gives_its_class_token(vit_folder: Path) -> None:
    video = draw_noise(20)
    features = load_frame_network(vit_folder).encode_frames(video)
    model = ViTModel.from_pretrained(vit_folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        wanted = model(by_hand(vit_folder, video)).last_hidden_state[:, 0]
    torch.testing.assert_close(features, wanted, atol=1e-5, rtol=1e-4)


def test_a_constant_clip_is_consistent_and_a_changing_one_less(vit_folder: Path) -> None:
    network, video = load_frame_network(vit_folder), draw_noise()
    still = video[:, :1].expand(-1, 4, -1, -1)
    assert measure_consistency(network.encode_frames(still)) == pytest.approx(1.0, abs=1e-6)
    changing = measure_consistency(network.encode_frames(video))
    assert changing is not None and changing < 0.999


def test_clip_serves_as_vision_network(clip_folder: Path) -> None:
    video = draw_noise()
    torch.testing.assert_close(
        load_frame_network(clip_folder).encode_frames(video), load_clip(clip_folder).encode_frames(video)
    )


def test_folders_that_lack_something_are_refused_by_name(tmp_path: Path, clip_folder: Path, vit_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_frame_network(tmp_path)
    bare = Path(shutil.copytree(vit_folder, tmp_path / "bare"))
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        load_frame_network(bare)
    with pytest.raises(CheckpointError, match="'vit'"):
        load_clip(vit_folder)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(CheckpointError, match="no vision network"):
        load_frame_network(tmp_path / "odd")
    pickled = Path(shutil.copytree(clip_folder, tmp_path / "pickled"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        load_clip(pickled)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_frame_network(pickled)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_videomae(tmp_path_factory.mktemp("videomae"))


def draw_bar(number: int, speed: int) -> np.ndarray:
    """A bright bar that moves by `speed` pixels a frame over a slope of its own."""
    frames = np.zeros((7, 24, 32, 3), np.uint8)
    frames[..., 2] = numpy_stream(0, "slope", number).integers(40, 200)
    for index, frame in enumerate(frames):
        left = (4 + number + speed * index) % 24
        frame[6:18, left : left + 6] = (220, 180, 40)
    return frames


def write_clips(folder: Path, speed: int, num_clips: int = 5) -> Path:
    for number in range(num_clips):
        write_video(folder / f"{number}.mp4", draw_bar(number, speed), 8)
    return folder


def test_features_are_those_of_the_network_itself(folder: Path) -> None:
    frames_FHWC = draw_bar(0, 2)
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
