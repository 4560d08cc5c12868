"""The decisions of the originals, sample by sample."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from frameloom.checkpoint.parity import read_case, read_table, run_case
from frameloom.core.parity import ParityCase
from frameloom.data import bucket_parity

GOLDENS = Path(__file__).parents[1] / "goldens"
# Outputs of each case, and the listed deviations among them.
CASES = {
    "cogvideox-fun/aspect_ratio_sampler": (19, 0),
    "cogvideox-fun/buckets_closest_ratio": (8, 0),
    "cogvideox-fun/buckets_token_length": (197, 0),
    "cogvideox-fun/collate_geometry": (97, 4),
    "cogvideox-fun/collate_pixels": (4, 1),
    "cogvideox-fun/dataset_geometry": (23, 0),
    "cogvideox-fun/frame_crop": (37, 0),
    "open-sora-plan/frame_index": (70, 0),
    "open-sora-plan/sampler": (36, 0),
    "open-sora-v2/batch_sampler": (60, 0),
    "open-sora-v2/bucket_decisions": (29, 0),
    "open-sora-v2/meta_columns": (9, 0),
    "open-sora-v2/resolution_tables": (163, 0),
    "open-sora-v2/video_transform_geometry": (3, 0),
}


def load(name: str) -> ParityCase:
    path = next(GOLDENS.glob(f"{name}.*"))
    return (read_table if path.suffix == ".json" else read_case)(path, name=name)


@pytest.mark.parametrize("name", CASES)
def test_decisions_equal_the_original(name: str) -> None:
    result = run_case(load(name), [bucket_parity])
    assert not result.failed, result.note
    assert result.is_good, result
    num_deviations = sum(output.verdict == "deviation" for output in result.outputs)
    assert (result.num_compared, num_deviations) == CASES[name]
    assert result.num_compared == len(result.outputs)


def test_a_table_is_known_by_what_it_holds() -> None:
    case = replace(load("open-sora-plan/sampler"), name="elsewhere/another_name")
    assert run_case(case, [bucket_parity]).is_good


def test_changed_pixels_and_missing_clips_are_found_out(tmp_path: Path) -> None:
    pixels = load("cogvideox-fun/collate_pixels")
    changed = {name: 255 - tensor for name, tensor in pixels.inputs.items()}
    assert not run_case(replace(pixels, inputs=changed), [bucket_parity]).is_good
    media = run_case(replace(load("open-sora-v2/meta_columns"), path=tmp_path / "meta.json"), [bucket_parity])
    assert media.failed and "is not beside it" in media.note


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("open-sora-v2/bucket_decisions", lambda config: config.update(base_seed=1)),
        ("open-sora-v2/batch_sampler", lambda config: config.update(seed=1)),
        ("cogvideox-fun/frame_crop", lambda config: config["random_frame_crop"][0].update(seed_PCG64=1)),
        (
            "cogvideox-fun/collate_geometry",
            lambda config: config["cases"][0]["args"].update(token_sample_size=128, video_sample_size=384),
        ),
        ("open-sora-plan/sampler", lambda config: config["cases"][2].update(torch_generator_seed=43)),
        ("cogvideox-fun/aspect_ratio_sampler", lambda config: config.update(seed=43)),
        ("open-sora-plan/frame_index", lambda config: config["clips"][1].update(read_time_seed=1)),
        ("open-sora-plan/frame_index", lambda config: config["index_build"][2]["settings"].update(drop_short_ratio=0)),
    ],
)
def test_another_setting_is_found_out(name: str, change: object) -> None:
    case = load(name)
    config = copy.deepcopy(case.config)
    change(config)
    result = run_case(ParityCase(name, config, {}, {}, {}), [bucket_parity])
    assert result.failed or any(output.verdict != "ok" for output in result.outputs)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lr_warmup.json").write_text(json.dumps({"a": 1}))
    assert not bucket_parity.matches(read_table(tmp_path / "lr_warmup.json", name="lr_warmup"))
