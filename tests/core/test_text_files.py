"""What is no JSON object is one message, whatever it is instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.core.errors import CheckpointError, DataError
from frameloom.core.text_files import parse_object, read_object


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{'a': 1}", "note: not JSON (Expecting property name"),
        (b"\xff\xfe{", "note: not JSON ("),
        ("[" * 100_000, "note: not JSON ("),
        ("[1]", "note: is a list, expected a JSON object"),
        ("null", "note: is null, expected a JSON object"),
        ("true", "note: is true or false, expected"),
    ],
    ids=["python", "no text", "too deep", "list", "null", "bool"],
)
def test_anything_else_is_told_with_the_way_out(text: str | bytes, told: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_object(text, where="note", error=DataError, fix="write it again")
    assert str(caught.value).startswith(told) and str(caught.value).endswith("; write it again")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read \(No such file or directory\); copy it"):
        read_object(path, error=CheckpointError, fix="copy it again")
    path.write_text('{"width": 4}')
    assert read_object(path, error=CheckpointError, fix="copy it again") == {"width": 4}
