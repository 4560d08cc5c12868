"""Prompt files: rows with settings of their own, and mistakes with their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.core.errors import ConfigError, DataError
from frameloom.sampling.batch import sample_many
from frameloom.sampling.request import ROW_SETTINGS, Row, expand_rows, read_prompts, read_rows
from tests.sampling.conftest import ALONE, Load

SETTINGS_CSV = """prompt,neg,seed,frames,guidance,name
"a red circle, small",,7,5,3.5,first
a blue square,blurry,,,,
"""


def test_rows_have_settings_of_their_own(tmp_path: Path, load: Load) -> None:
    (tmp_path / "rows.csv").write_text(SETTINGS_CSV)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a star", "height": 64, "image": "a.png"}\n\n{"text": "a dot"}\n')
    rows = [*read_rows(["on the line"], tmp_path / "rows.csv"), *read_rows([], tmp_path / "rows.jsonl")]
    requests = expand_rows(rows, load("opensora2").settings, first_seed=10, num_samples=2)
    assert [request.seed for request in requests] == [10, 11, 7, 8, 14, 15, 16, 17, 18, 19]
    assert requests[2].prompt == "a red circle, small" and requests[2].name == "first"
    settings = [request.settings for request in requests]
    assert settings[2] is not None and (settings[2].frames, settings[2].guidance) == (5, 3.5)
    assert settings[4] is not None and settings[4].negative_prompt == "blurry" and settings[4].frames == 9
    assert settings[6] is not None and settings[6].height == 64 and requests[6].head == Path("a.png")
    assert requests[8].prompt == "a dot" and "precision" not in ROW_SETTINGS


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
        read_rows([], tmp_path / name)


def test_a_setting_that_cannot_be_is_told_with_its_line(load: Load) -> None:
    with pytest.raises(DataError, match=r"rows:3: steps is 0"):
        expand_rows([Row("x", settings={"steps": 0}, where="rows:3")], load("latte").settings, first_seed=0)
    sampler = load("latte")
    wrong = expand_rows([Row("x", settings={"height": 40})], sampler.settings, first_seed=0)
    with pytest.raises(ConfigError, match="multiples of 16 pixels"):
        sample_many(sampler, wrong, Path("nowhere"), ALONE)
    wrong = expand_rows([Row("x", settings={"frames": 8})], sampler.settings, first_seed=0)
    with pytest.raises(ConfigError, match="takes 5 or 9 frames, not 8"):
        sample_many(sampler, wrong, Path("nowhere"), ALONE)
