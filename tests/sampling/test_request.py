"""Prompt files: rows with settings of their own, and mistakes with their line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frameloom.core.errors import ConfigError, DataError
from frameloom.sampling.batch import expand_requests, sample_many
from frameloom.sampling.request import read_prompts, read_requests
from tests.sampling.conftest import ALONE, Load

SETTINGS_CSV = """prompt,neg,seed,frames,guidance,name
"a red circle, small",,7,5,3.5,first
a blue square,blurry,,,,
"""


def test_rows_have_settings_of_their_own(tmp_path: Path, load: Load) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "rows.csv").write_text(SETTINGS_CSV)
    row = {"prompt": "a star", "height": 64, "image": str(tmp_path / "a.png")}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + '\n\n{"text": "a dot"}\n')
    common = {"fps": 4, "video": tmp_path / "a.png"}
    rows = [*read_requests(["on the line"], tmp_path / "rows.csv"), *read_requests([], tmp_path / "rows.jsonl", common)]
    requests = expand_requests(load("opensora2"), rows, seed=10, num=2)
    assert [request.seed for request in requests] == [10, 11, 7, 8, 14, 15, 16, 17, 18, 19]
    assert requests[2].prompt == "a red circle, small" and requests[2].name == "first"
    assert (requests[2].frames, requests[2].guidance) == (5, 3.5)
    assert requests[4].negative_prompt == "blurry" and requests[4].frames == 9
    assert requests[6].height == 64 and requests[6].image == tmp_path / "a.png" and requests[6].fps == 4
    assert requests[8].prompt == "a dot" and requests[8].video == tmp_path / "a.png" and requests[0].video is None


def test_prompts_come_from_the_line_and_from_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n two \n")
    assert read_prompts(["zero"], file) == ["zero", "one", "two"]
    with pytest.raises(DataError, match="no prompt given"):
        read_prompts([], None)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"prompts.txt"):
        read_prompts([], file)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "prompt,weights\nx,raw\n", r"a.csv:2: has the column 'weights', which is not known"),
        ("a.csv", "prompt,framse\nx,9\n", r"a.csv:2: has the column 'framse'.*'frames'"),
        ("a.csv", "seed\n1\n", r"a.csv:2: has no prompt"),
        ("a.csv", "prompt\na,b\n", "more values than columns"),
        ("a.jsonl", '{"prompt": "x", "seed": "one"}', "seed is 'one'"),
        ("a.jsonl", "[1]", "is a list, expected a JSON object"),
        ("a.jsonl", "{", "not JSON"),
        ("a.txt", "\n\n", "no prompt given"),
    ],
)
def test_a_wrong_prompt_file_is_told_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_requests([], tmp_path / name)


def test_a_setting_that_cannot_be_is_refused_with_its_line(tmp_path: Path, load: Load) -> None:
    (tmp_path / "rows.csv").write_text("prompt,steps\nx,1\nx,0\n")
    with pytest.raises(DataError, match=r"rows.csv:3: steps is 0, expected a whole number of at least 1"):
        read_requests([], tmp_path / "rows.csv")
    pipeline = load("latte")
    for fields, message in (({"height": 40}, "multiples of 16 pixels"), ({"frames": 8}, "takes 5 or 9 frames, not 8")):
        with pytest.raises(ConfigError, match=message):
            sample_many(pipeline, [pipeline.request("x", **fields)], Path("nowhere"), ALONE)
