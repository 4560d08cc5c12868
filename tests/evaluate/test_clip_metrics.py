"""Metrics of single clips on constructed clips and features, and FID through a real network."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from frameloom.core.errors import ConfigError, DataError
from frameloom.core.random import stream
from frameloom.data.loading.clip_view import ClipView, list_clips
from frameloom.data.media.writing import write_image
from frameloom.demo.shapes_score import PROMPT_METRICS, are_shapes
from frameloom.evaluate.clip_metrics import (
    build_clip_measures,
    measure_consistency,
    measure_flicker,
    measure_motion,
    measure_text_similarity,
)
from frameloom.evaluate.comparison import compare_sets, pair_clips
from frameloom.evaluate.networks import load_frame_network
from frameloom.evaluate.pair_metrics import Measures
from tests.evaluate.networks import make_clip, make_vit

RED_CIRCLE = "a red circle moves left over a gray background"


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vit(tmp_path_factory.mktemp("vit"))


def write_set(folder: Path, levels: list[int]) -> Path:
    """Pictures with a gradient whose steepness is given."""
    ramp = np.linspace(0, 1, 24)[None, :, None]
    for number, level in enumerate(levels):
        picture = np.broadcast_to(ramp * level, (24, 24, 3))
        write_image(folder / f"{number}.png", picture.astype(np.uint8))
    return folder


def test_fid_of_a_network_is_the_distance_of_its_features(tmp_path: Path, vit: Path) -> None:
    ours, other = write_set(tmp_path / "ours", [50, 90, 130, 170]), write_set(tmp_path / "other", [200, 220, 240, 250])
    alone = build_clip_measures([], network=vit)
    tables = [
        compare_sets(pair_clips(list_clips(ours), list_clips(side), "none"), Measures({}), view=ClipView(), alone=alone)
        for side in (ours, other)
    ]
    assert tables[0].more["fid"] == pytest.approx(0, abs=1e-6) and tables[0].more["fid_frames"] == 4
    # By hand, with another root of the product than ours: its eigenvalues are those of A B.
    network = load_frame_network(vit)
    sides = []
    for folder in (ours, other):
        pixels = [torch.from_numpy(read_picture(path)) for path in sorted(folder.glob("*.png"))]
        sides.append(np.concatenate([network.encode_frames(picture).double().numpy() for picture in pixels]))
    gap = np.square(sides[0].mean(0) - sides[1].mean(0)).sum()
    a, b = (np.cov(side.T) for side in sides)
    root = np.sqrt(np.linalg.eigvals(a @ b).real.clip(min=0)).sum()
    assert tables[1].more["fid"] == pytest.approx(gap + np.trace(a) + np.trace(b) - 2 * root, rel=1e-4)
    assert any("Inception" in note for note in tables[1].notes)


def read_picture(path: Path) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(path)).transpose(2, 0, 1)[:, None].copy()


def test_all_metrics_of_a_still_clip_have_their_known_values(tmp_path: Path, vit: Path) -> None:
    clip = make_clip(tmp_path / "clip")
    measures = build_clip_measures(None, network=vit, clip=clip)
    video = torch.full((3, 4, 32, 32), 90, dtype=torch.uint8)
    found = measures(video, RED_CIRCLE)
    assert found["motion_px"] == 0 and found["flicker"] == 0 and found["consistency"] == pytest.approx(1, abs=1e-6)
    assert found["clip_similarity"] is not None and -1 <= found["clip_similarity"] <= 1
    video[:, 1::2] += 4
    assert measures(video, RED_CIRCLE)["flicker"] == pytest.approx(4.0)


def test_prompt_following_is_that_of_the_scorer(shared_world: Path) -> None:
    from frameloom.data.manifest.manifest import Manifest

    manifest = Manifest.read(shared_world / "data" / "manifest.parquet", where={"split": "train"})
    row = next(row for row in range(len(manifest)) if manifest.clip(row).kind == "video")
    clip = list_clips(manifest.file(row))
    measures = build_clip_measures(["shapes"], prompt_metrics=PROMPT_METRICS)
    right = manifest.caption(row)
    wrong = right.replace(right.split()[1], "red" if right.split()[1] != "red" else "blue", 1)
    for prompt, expected in ((right, 1.0), (wrong, 0.0)):
        pairs, prompts = pair_clips(clip, [], "none"), {clip[0].name: prompt}
        table = compare_sets(pairs, Measures({}), view=ClipView(), alone=measures, prompts=prompts)
        assert [record["shapes_right"] for record in table.good] == [expected], prompt
    assert are_shapes([right, wrong]) and not are_shapes([right, "a cat"]) and not are_shapes([])


def test_missing_networks_prompts_and_names_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--network FOLDER"):
        build_clip_measures(["consistency"])
    with pytest.raises(ConfigError, match="--clip FOLDER"):
        build_clip_measures(["clip"])
    with pytest.raises(ConfigError, match="flicker"):
        build_clip_measures(["fliker"])
    with pytest.raises(ConfigError, match="shapes"):
        build_clip_measures(["shapes"])
    ours = list_clips(write_set(tmp_path / "ours", [100]))
    alone = build_clip_measures(["shapes"], prompt_metrics=PROMPT_METRICS)
    table = compare_sets(pair_clips(ours, [], "none"), Measures({}), view=ClipView(), alone=alone)
    assert "--prompts FILE" in table.bad[0]["error"]
    with pytest.raises(DataError, match="none of 1"):
        table.refuse_empty()


def moving_square(right: int, down: int = 0, *, frames: int = 5, side: int = 64, square: int = 20) -> Tensor:
    """A textured square that goes `right` and `down` pixels a frame over a plain background."""
    texture = torch.randint(100, 256, (3, square, square), generator=stream(0, "test motion"), dtype=torch.uint8)
    video = torch.full((3, frames, side, side), 50, dtype=torch.uint8)
    for frame in range(frames):
        top, left = 6 + down * frame, 6 + right * frame
        video[:, frame, top : top + square, left : left + square] = texture
    return video


@pytest.mark.parametrize(
    ("right", "down", "expected"), [(0, 0, 0.0), (1, 0, 1.0), (4, 0, 4.0), (0, 7, 7.0), (3, 4, 5.0)]
)
def test_a_shape_that_moves_k_pixels_a_frame_has_motion_k(right: int, down: int, expected: float) -> None:
    assert measure_motion(moving_square(right, down)) == pytest.approx(expected, abs=1e-6)


def test_plain_shapes_count_wherever_their_edges_lie() -> None:
    video = torch.full((3, 2, 64, 64), 40, dtype=torch.uint8)
    for left in range(8, 17):  # at 8 and 16 all edges lie between cells of 8 pixels
        video[:] = 40
        for frame in range(2):
            video[:, frame, 16:40, left + 5 * frame : left + 5 * frame + 24] = 220
        assert measure_motion(video) == pytest.approx(5.0, abs=1e-6), left


def test_motion_of_large_pictures_is_told_in_their_own_pixels() -> None:
    small = moving_square(3, 0)
    large = small.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    assert measure_motion(large) == pytest.approx(12.0, abs=1e-6)


def test_noise_does_not_count_as_motion() -> None:
    still = moving_square(0).int()
    noisy = (still + torch.randint(-3, 4, still.shape, generator=stream(0, "test noise"))).clamp(0, 255).to(torch.uint8)
    found = measure_motion(noisy)
    assert found is not None and found < 0.5


def test_flicker_is_the_step_of_the_still_parts_and_ignores_what_moves() -> None:
    video = moving_square(4)
    assert measure_flicker(video) == 0.0
    flickering = video.clone()
    flickering[:, 1::2] = (flickering[:, 1::2].int() + 6).clamp(max=255).to(torch.uint8)
    assert measure_flicker(flickering) == pytest.approx(6.0)


def test_steady_fading_is_flicker_of_its_slope_until_it_leaves_the_still_range() -> None:
    slow = torch.arange(0, 10, 2, dtype=torch.uint8).reshape(1, 5, 1, 1).expand(3, 5, 16, 16)
    assert measure_flicker(slow) == pytest.approx(2.0)
    assert measure_flicker(slow * 10) is None


def test_pictures_have_neither_motion_nor_flicker() -> None:
    picture = moving_square(0, frames=1)
    assert measure_motion(picture) is None and measure_flicker(picture) is None
    assert measure_motion(torch.zeros(3, 4, 12, 40, dtype=torch.uint8)) is None


def test_frames_that_stay_the_same_are_wholly_consistent() -> None:
    assert measure_consistency(torch.tensor([[3.0, 4.0]]).expand(6, 2)) == pytest.approx(1.0)
    assert measure_consistency(torch.eye(6)) == 0.0


def test_features_that_turn_by_an_angle_a_frame_have_the_mean_of_both_cosines() -> None:
    angles = torch.arange(4) * 0.3
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    expected = sum((math.cos(0.3 * frame) + math.cos(0.3)) / 2 for frame in (1, 2, 3)) / 3
    assert measure_consistency(features) == pytest.approx(expected, abs=1e-6)
    assert measure_consistency(5 * features) == pytest.approx(expected, abs=1e-6)


def test_opposite_features_count_as_nothing_and_a_picture_has_no_number() -> None:
    assert measure_consistency(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) == 0.0
    assert measure_consistency(torch.ones(1, 3)) is None


def test_text_similarity_is_the_mean_cosine_over_frames() -> None:
    features = torch.tensor([[2.0, 0.0], [0.0, 5.0], [1.0, 1.0], [-1.0, 0.0]])
    expected = (1 + 0 + math.sqrt(0.5) - 1) / 4
    assert measure_text_similarity(features, torch.tensor([7.0, 0.0])) == pytest.approx(expected)
