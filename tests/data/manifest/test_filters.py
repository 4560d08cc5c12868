from __future__ import annotations

import datetime
from decimal import Decimal

import polars as pl
import pytest

from frameloom.core.errors import DataError
from frameloom.data.manifest.filters import filter_table, parse_where

TABLE = pl.DataFrame(
    {
        "id": [0, 1, 2, 3],
        "split": ["train", "train", "val", None],
        "height": pl.Series([480, 720, 60_000, 240], dtype=pl.Int32),
        "width": pl.Series([640, 1280, 60_000, 320], dtype=pl.Int32),
        "score_motion": [1.5, float("nan"), 3.0, None],
        "ok": [True, False, True, None],
        "aes-score": [1, 2, 3, 4],
        "tags": [["a"], ["b"], [], None],
        "day": [datetime.date(2024, 1, 1)] * 4,
        "nothing": [None] * 4,
        "mode": pl.Series(["x", "y", "x", "y"], dtype=pl.Categorical),
        "fps": [12.0, 24.0, 23.976, None],
        "rate": pl.Series([2.7, 12, 24, None], dtype=pl.Float32),
        "price": [Decimal("2.70"), Decimal("2.00"), None, Decimal("-1.50")],
        "code": pl.Series([2**63 + 1, 2**63 + 2, 3, None], dtype=pl.UInt64),
    }
)


def keep(where: str) -> list[int]:
    return TABLE.filter(parse_where(where, TABLE.schema, source="m")[0].expression)["id"].to_list()


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("score_motion > 2 and height >= 480", [2]),
        ("score_motion > 1", [0, 2]),  # NaN is missing, not the largest number
        ("not score_motion > 2", [0]),  # what is missing is neither above nor below
        ("split == 'train'", [0, 1]),
        ('split != "train"', [2]),
        ("split in ['train', 'val']", [0, 1, 2]),
        ("split not in ['train']", [2]),
        ("split is null", [3]),
        ("score_motion is not null", [0, 2]),
        ("id == 0 or id == 1 and height > 9999", [0]),
        ("not (score_motion > 2 and id < 2)", [0, 2, 3]),
        ("(id == 0 or id == 1) and height > 500", [1]),
        ("not (id == 0 or id == 1)", [2, 3]),
        ("not not id == 1", [1]),
        ("height * width > 2000000000", [2]),  # more than 32 bits
        ("width / height < 1.34", [0, 2, 3]),
        ("id + 1 * 2 - 1 == 3", [2]),
        ("-id < -1", [2, 3]),
        ("id in [-1, 2.0, 3]", [2, 3]),
        ("300 < height <= 720", [0, 1]),
        ("ok", [0, 2]),
        ("ok == false", [1]),
        ("not ok", [1]),
        ("`aes-score` >= 3", [2, 3]),
        ("tags is null", [3]),
        ("nothing is null", [0, 1, 2, 3]),
        ("nothing > 3", []),
        ("mode == 'x' AND id > 0", [2]),
        ("height == 4.8e2", [0]),
        ("id in []", []),
        ("split == 'it\\'s'", []),
        ("fps in [12]", [0]),
        ("fps not in [12, 24]", [2]),
        ("fps * 2 in [24, 48]", [0, 1]),
        ("rate in [2.7, 12]", [0, 1]),
        ("price > 2", [0]),
        ("price in [2, -1.5]", [1, 3]),
        ("code == 9223372036854775809", [0]),
        ("code in [9223372036854775810, 3]", [1, 2]),
        ("-code < -3", [0, 1]),
        ("id < 1" + "0" * 40, [0, 1, 2, 3]),
        ("id not in [1" + "0" * 25 + "]", [0, 1, 2, 3]),
    ],
)
def test_a_filter_keeps_the_rows_it_describes(where: str, rows: list[int]) -> None:
    assert keep(where) == rows


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("heigth > 2", r"character 1: no column 'heigth'; did you mean 'height'\?"),
        ("zzzzzzzz > 2", "known columns: id, split"),
        ("height = 2", "'=' cannot be read; write == to compare"),
        ("height > 'a'", r"height \(numbers\) and 'a' \(text\) cannot be compared"),
        ("split > 3", "cannot be compared"),
        ("split == null", "write 'is null'"),
        ("height", "height is numbers; expected a comparison"),
        ("height and id > 1", "height is numbers; expected a comparison"),
        ("id > 1 and split", "split is text; expected a comparison"),
        ("split + 1 > 2", "split is text; expected a number"),
        ("height > ", "expected a column or a value, found 'the end'"),
        ("height > 3 4", "'4' is not expected here"),
        ("(height > 3", r"expected '\)', found 'the end'"),
        ("split == 'train", "the quote is not closed"),
        ("split in 'train'", r"expected '\['"),
        ("split in [train]", "expected a value in the list, found 'train'"),
        ("split in [3]", "3 is number, but split holds text"),
        ("split in ['a' 'b']", "expected ','"),
        ("split is 'a'", "expected 'null'"),
        ("day > 3", "cannot be compared"),
        ("tags == tags", "cannot be compared"),
        ("height > 3 && id > 1", "'&' cannot be read; write 'and'"),
        ("3x > 1", "cannot be read"),
        ("__import__('os').system('touch x') == 0", r"'\(' is not expected here"),
        ("height.__class__ == 1", "cannot be read"),
        ("lambda", "no column 'lambda'"),
        ("height ** 2 > 3", "no part of the language"),
        ("(" * 200 + "height > 1" + ")" * 200, "more than 30 levels"),
        ("not " * 200 + "ok", "more than 30 levels"),
        ("-" * 200 + "1 > 2", "more than 30 levels"),
        ("height > 1 or " * 1000 + "height > 1", "at most 10000 are read"),
    ],
)
def test_a_wrong_filter_is_explained_with_its_place(where: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        keep(where)
    assert str(caught.value).startswith('m: filter "')


def test_a_long_filter_is_no_deep_one() -> None:
    assert keep(" or ".join(["ok"] * 1600)) == [0, 2]
    assert keep(" + ".join(["id"] * 100) + " > 100") == [2, 3]


def test_a_mapping_keeps_equal_values_and_lists() -> None:
    assert filter_table(TABLE, {"split": "train", "height": [480, 240]}, source="m")["id"].to_list() == [0]
    assert filter_table(TABLE, {"ok": True}, source="m")["id"].to_list() == [0, 2]
    assert filter_table(TABLE, {}, source="m").height == filter_table(TABLE, " ", source="m").height == 4
    assert filter_table(TABLE, {"fps": 12}, source="m")["id"].to_list() == [0]
    assert filter_table(TABLE, {"fps": [12, 24], "price": 2}, source="m")["id"].to_list() == [1]
    with pytest.raises(DataError, match=r"cannot filter by split: 3; the column holds text"):
        filter_table(TABLE, {"split": 3}, source="m")
    with pytest.raises(DataError, match=r"cannot filter by 'spilt'; did you mean 'split'\?"):
        filter_table(TABLE, {"spilt": "train"}, source="m")


def test_a_filter_that_keeps_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="no row has split = 'test'"):
        filter_table(TABLE, {"split": "test"}, source="m")
    with pytest.raises(DataError, match="no row has id > 99"):
        filter_table(TABLE, "id > 99", source="m")
