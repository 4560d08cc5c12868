"""The scorer is right on real clips, at chance on shuffled captions, and scores what a model samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from frameloom.core.errors import ConfigError, DataError
from frameloom.core.random import numpy_stream
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.decode import read_clip, read_image
from frameloom.demo.shapes import BACKGROUNDS, ShapeAttributes, heldout_prompts, render_clip
from frameloom.demo.shapes_score import UNREADABLE, score_clip, score_from_first_frames, score_prompts, score_run
from frameloom.demo.shapes_set import write_shapes
from tests.sampling.conftest import Load

Frames = NDArray[np.uint8]


@pytest.fixture(scope="module")
def manifest_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes") / "set", count=300, seed=11)


@pytest.fixture(scope="module")
def small_clips(manifest_path: Path) -> list[tuple[Frames, str]]:
    """What a model is trained on: the first 9 frames, 64x64."""
    manifest = Manifest.read(manifest_path)
    clips = []
    for row in range(len(manifest)):
        path, caption = manifest.file(row), manifest.caption(row)
        if manifest.clip(row).kind == "image":
            pixels_CFHW = read_image(path, height=64, width=64)
        else:
            pixels_CFHW = read_clip(path, indices=range(9), height=64, width=64)
        clips.append((pixels_CFHW.permute(1, 2, 3, 0).numpy(), caption))
    return clips


def read_frames(manifest: Manifest, row: int) -> Frames:
    """The whole clip at its own size."""
    clip, path = manifest.clip(row), manifest.file(row)
    if clip.kind == "image":
        pixels_CFHW = read_image(path, height=clip.height, width=clip.width)
    else:
        pixels_CFHW = read_clip(path, indices=range(clip.frames), height=clip.height, width=clip.width)
    return pixels_CFHW.permute(1, 2, 3, 0).numpy()


def draw(attributes: ShapeAttributes, num_frames: int = 9) -> Frames:
    return render_clip(
        attributes, height_px=64, width_px=64, num_frames=num_frames, random=numpy_stream(0, "test-score")
    )


def blur(frames_FHWC: Frames, times: int) -> NDArray[np.float32]:
    """Repeated [1 2 1] / 4 along both sides; each time adds half a squared pixel of variance."""
    video = frames_FHWC.astype(np.float32)
    for _ in range(times):
        for dim in (1, 2):
            video = (np.roll(video, 1, dim) + 2 * video + np.roll(video, -1, dim)) / 4
    return video


def test_real_files_score_99_percent(manifest_path: Path) -> None:
    manifest = Manifest.read(manifest_path)
    report = score_prompts((read_frames(manifest, row), manifest.caption(row)) for row in range(len(manifest)))
    assert report.count == 300
    assert report.all_right >= 0.99
    assert min(report.accuracy.values()) >= 0.99


def test_shuffled_captions_score_near_chance(small_clips: list[tuple[Frames, str]]) -> None:
    order = numpy_stream(0, "test-shuffle").permutation(len(small_clips))
    report = score_prompts([(frames, small_clips[i][1]) for i, (frames, _) in zip(order, small_clips, strict=True)])
    assert report.all_right <= 0.03
    for name, share in report.accuracy.items():
        assert share <= report.chance[name] + 0.1, name
    assert report.accuracy["colour"] > 0.05  # chance, not nothing


def test_small_clips_score_99_percent(small_clips: list[tuple[Frames, str]]) -> None:
    assert score_prompts(small_clips).all_right >= 0.99


@pytest.mark.parametrize(("blurs", "sigma"), [(2, 8), (8, 8), (2, 25)])
def test_blur_and_noise_cost_little(small_clips: list[tuple[Frames, str]], blurs: int, sigma: float) -> None:
    random = numpy_stream(0, "test-noise", blurs)
    noisy = [
        (np.clip(blur(frames, blurs) + random.normal(0, sigma, frames.shape), 0, 255).astype(np.uint8), caption)
        for frames, caption in small_clips[::2]
    ]
    assert score_prompts(noisy).all_right >= 0.97


def test_only_what_a_caption_names_counts() -> None:
    frames = draw(ShapeAttributes("red", "circle", "gray", "left", "quickly"))
    said = score_prompts([(frames, "a red circle moves left over a gray background")])
    assert (said.all_right, "speed" in said.accuracy) == (1.0, False)
    wrong = score_prompts([(frames, "a red circle moves left slowly over a gray background")])
    assert (wrong.all_right, wrong.accuracy["speed"], wrong.accuracy["motion"]) == (0.0, 0.0, 1.0)


def test_chance_is_that_of_guessing() -> None:
    frames = draw(ShapeAttributes("red", "circle", "gray", "left", "quickly"))
    report = score_prompts([(frames, "a red circle over a gray background")])
    assert report.chance["all_right"] == pytest.approx(1 / 6 / 3 / 3)


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_empty_clip_is_unreadable(background: str) -> None:
    frames = np.broadcast_to(np.array(BACKGROUNDS[background], np.uint8), (9, 64, 64, 3))
    assert score_clip(frames) == ShapeAttributes(UNREADABLE, UNREADABLE, background, UNREADABLE)


def test_noise_shows_no_shape() -> None:
    noise = numpy_stream(0, "test-noise").integers(0, 256, (9, 64, 64, 3), dtype=np.uint8)
    assert score_clip(noise).shape == UNREADABLE


def test_two_shapes_are_not_one() -> None:
    frames = draw(ShapeAttributes("red", "circle", "gray", "still"))
    assert score_clip(frames).shape == "circle"
    assert score_clip(np.concatenate([frames, frames], axis=2)).shape == UNREADABLE


def test_jumping_shape_does_not_move_left() -> None:
    frames = draw(ShapeAttributes("red", "circle", "gray", "left", "quickly"))
    assert score_clip(frames).motion == "left"
    assert score_clip(frames[[0, 8, 1, 7, 2, 6, 3, 5, 4]]).motion == UNREADABLE


def test_backwards_is_the_other_direction() -> None:
    frames = draw(ShapeAttributes("red", "circle", "gray", "up", "slowly"))
    assert (score_clip(frames).motion, score_clip(frames[::-1]).motion) == ("up", "down")


def test_other_captions_and_no_clips_are_refused() -> None:
    frames = draw(ShapeAttributes("red", "circle", "gray"), 1)
    with pytest.raises(DataError, match="a cat"):
        score_prompts([(frames, "a cat")])
    with pytest.raises(ValueError, match="no clips"):
        score_prompts([])


SIZE = {"height": 64, "width": 64, "steps": 2}


def test_first_frames_are_those_of_clips_that_the_prompts_describe(load: Load) -> None:
    """Frames put back as they were given are alike to the bit, and show background and colour of their prompts."""
    scored = score_from_first_frames(load("opensora2", keep="pixels", **SIZE), num_prompts=6, seed=1)
    assert [result.request.prompt for result in scored.results] == heldout_prompts(6, seed=1)
    assert scored.first_frame_db is not None and scored.first_frame_db > 90
    for result in scored.results:
        found = score_clip(result.frames[:1])
        assert found.background in result.request.prompt and found.colour in result.request.prompt
    assert scored.to_json()["first_frame_db"] == scored.first_frame_db


def test_a_model_that_goes_on_from_nothing_scores_by_chance(load: Load) -> None:
    sampler = load("opensora2", keep="latent", **SIZE)
    scored = score_from_first_frames(sampler, num_prompts=6, seed=1)
    assert scored.first_frame_db is not None and scored.first_frame_db < 40
    assert scored.all_right < 1
    assert score_run(sampler, num_prompts=2, seed=1).first_frame_db is None


def test_a_model_of_text_alone_takes_no_first_frame(load: Load) -> None:
    with pytest.raises(ConfigError, match="image"):
        score_from_first_frames(load("latte", **SIZE), num_prompts=1, seed=1)
