"""The decisions of the originals, sample by sample."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from frameloom.checkpoint.parity import read_table, run_case
from frameloom.core.parity import ParityCase
from frameloom.data import bucket_parity

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = sorted(bucket_parity._RUNNERS)


def load(name: str) -> ParityCase:
    return read_table(GOLDENS / f"{name}.json", name=name)


@pytest.mark.parametrize("name", CASES)
def test_decisions_equal_the_original(name: str) -> None:
    result = run_case(load(name), [bucket_parity])
    assert not result.failed, result.note
    assert result.num_compared == len(result.outputs) > 0
    assert [output for output in result.outputs if output.verdict != "ok"] == []


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
