"""Features of frames from real tiny networks, against those networks called by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer, ViTModel

from frameloom.core.errors import CheckpointError
from frameloom.core.random import stream
from frameloom.evaluate.clip_metrics import measure_consistency, measure_text_similarity
from frameloom.evaluate.networks import load_clip, load_frame_network
from tests.evaluate.networks import make_clip, make_vit

CAPTION = "a red circle moves left"


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def vit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vit(tmp_path_factory.mktemp("vit"))


def draw_clip(frames: int = 3) -> Tensor:
    return torch.randint(0, 256, (3, frames, 24, 40), generator=stream(0, "test frames"), dtype=torch.uint8)


def by_hand(folder: Path, video: Tensor) -> Tensor:
    pictures = [Image.fromarray(video[:, frame].permute(1, 2, 0).numpy()) for frame in range(video.shape[1])]
    return CLIPImageProcessorPil.from_pretrained(folder)(pictures, return_tensors="pt")["pixel_values"]


def test_clip_similarity_is_that_of_the_model_itself(clip_folder: Path) -> None:
    video, network = draw_clip(), load_clip(clip_folder)
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
    video = draw_clip(20)
    features = load_frame_network(vit_folder).encode_frames(video)
    model = ViTModel.from_pretrained(vit_folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        wanted = model(by_hand(vit_folder, video)).last_hidden_state[:, 0]
    torch.testing.assert_close(features, wanted, atol=1e-5, rtol=1e-4)


def test_a_constant_clip_is_consistent_and_a_changing_one_less(vit_folder: Path) -> None:
    network, video = load_frame_network(vit_folder), draw_clip()
    still = video[:, :1].expand(-1, 4, -1, -1)
    assert measure_consistency(network.encode_frames(still)) == pytest.approx(1.0, abs=1e-6)
    changing = measure_consistency(network.encode_frames(video))
    assert changing is not None and changing < 0.999


def test_clip_serves_as_vision_network(clip_folder: Path) -> None:
    video = draw_clip()
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
