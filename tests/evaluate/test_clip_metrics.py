"""Metrics of generated clips alone and FID through a real network, on files with known answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from frameloom.core.errors import ConfigError, DataError
from frameloom.data.loading.clip_view import ClipView, list_clips
from frameloom.data.media.writing import write_image
from frameloom.demo.shapes_score import PROMPT_METRICS, are_shapes
from frameloom.evaluate.clip_metrics import build_clip_measures
from frameloom.evaluate.comparison import Alone, compare_sets, pair_clips
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
    alone = Alone(build_clip_measures([], network=vit))
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
        alone = Alone(measures, {clip[0].name: prompt})
        table = compare_sets(pair_clips(clip, [], "none"), Measures({}), view=ClipView(), alone=alone)
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
    alone = Alone(build_clip_measures(["shapes"], prompt_metrics=PROMPT_METRICS))
    table = compare_sets(pair_clips(ours, [], "none"), Measures({}), view=ClipView(), alone=alone)
    assert "--prompts FILE" in table.bad[0]["error"]
    with pytest.raises(DataError, match="none of 1"):
        table.refuse_empty()
