"""Caption cleaning: the original's texts, the three ways it was applied, and rules that the goldens do not reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from frameloom.core.errors import DataError
from frameloom.models.text.base import TextOptions
from frameloom.models.text.cleaning import Cleaning, clean_as, clean_caption
from tests.parity.cases import ParityCase
from tests.parity.opensora_plan_data import run_cleaning

GOLDEN = Path(__file__).parents[2] / "goldens" / "open-sora-plan" / "text_cleaning.json"


def read_golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def to_case(content: dict[str, Any]) -> ParityCase:
    return ParityCase("open-sora-plan/text_cleaning", content, {}, {}, {})


def test_every_golden_text_is_equal() -> None:
    content = read_golden()
    assert len(content["cases"]) == 36
    for item in content["cases"]:
        for keep_chinese in (True, False):
            wanted = item[f"out_support_chinese_{str(keep_chinese).lower()}"]
            assert clean_caption(str(item["input"]), keep_chinese=keep_chinese) == wanted


def test_parity_counts_the_texts_that_differ() -> None:
    content = read_golden()
    assert [float(output.ours) for output in run_cleaning(to_case(content))] == [0, 0]
    content["cases"][3]["out_support_chinese_true"] += "!"
    outputs = run_cleaning(to_case(content))
    assert [float(output.ours) for output in outputs] == [1, 0]
    assert all(torch.equal(output.expected, torch.zeros(())) and output.tolerance == 0 for output in outputs)


def test_modes_differ_where_the_originals_did() -> None:
    def clean(caption: str) -> list[str]:
        return [clean_as(caption, mode, keep_chinese=False) for mode in ("off", "once", "twice", "list")]

    assert clean("a%2520Cat") == ["a%2520Cat", "a%20cat", "a cat", "a%20cat"]
    assert clean('Say "hi"') == ['Say "hi"', 'say "hi"', 'say "hi"', 'say "hi']
    assert clean("中文") == ["中文", "", "", '"']


def test_the_null_prompt_stays_empty_in_every_mode() -> None:
    assert {clean_as("", mode, keep_chinese=True) for mode in get_args(Cleaning)} == {""}
    assert clean_caption(str([""]), keep_chinese=True) == '"'  # what the original would make of it


def test_broken_letters_are_mended() -> None:
    assert clean_caption("\uff46\uff55\uff4c\uff4c width \ufb01ne", keep_chinese=False) == "full width fine"
    assert clean_caption("cafe\u0301 au\x00 lait", keep_chinese=False) == "caf\u00e9 au lait"


@pytest.mark.parametrize("caption", ["clip.html", "a&b.htm", "c:\\video"])
def test_a_caption_that_looks_like_a_file_gives_no_warning(caption: str) -> None:
    assert clean_caption(caption, keep_chinese=False)


def test_markup_that_cannot_be_read_is_named() -> None:
    with pytest.raises(DataError, match=r"caption '<!\[0': its markup cannot be read.*cleaning: off"):
        clean_caption("<![0", keep_chinese=False)


def test_options_offer_the_modes_of_the_cleaning() -> None:
    assert get_args(get_type_hints(TextOptions)["cleaning"]) == get_args(Cleaning)
