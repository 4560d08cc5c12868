from __future__ import annotations

from typing import Any

import pytest

from frameloom.config.loading.yaml_values import format_value, parse_document, parse_value
from frameloom.core.errors import ConfigError
from frameloom.core.random import numpy_stream


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("-3", -3),
        ("-1e-5", -1e-5),
        ("10_000", 10000),
        ("012", 12),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("[1.0, 45]", [1.0, 45]),
        ("{a: 1, b: [x, 1e-3]}", {"a": 1, "b": ["x", 1e-3]}),
    ],
)
def test_values_read_as_a_person_means_them(text: str, value: Any) -> None:
    found = parse_value(text, where="--key")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["yes", "no", "on", "off", "2024-01-01", "1:30", "0x1F", "1e", "e5", "tRUE", "'1e-5'"])
def test_what_looks_like_another_type_stays_text(text: str) -> None:
    assert parse_value(text, where="--key") == text.strip("'")


def test_every_key_and_item_has_its_line() -> None:
    value, lines = parse_document("a:\n  b: 1\n\n  c:\n  - x\n  - {d: 2}\n", where="f.yaml")
    assert value == {"a": {"b": 1, "c": ["x", {"d": 2}]}}
    assert lines[("a",)] == 1
    assert lines[("a", "b")] == 2
    assert lines[("a", "c")] == 4
    assert lines[("a", "c", "0")] == 5
    assert lines[("a", "c", "1", "d")] == 6


def test_aliases_are_copied() -> None:
    value, _ = parse_document("a: &x {k: [1]}\nb: *x\n", where="f.yaml")
    assert value["b"] == value["a"]
    assert value["b"]["k"] is not value["a"]["k"]


def test_whole_number_keys_become_one_spelling() -> None:
    assert parse_document("9: a\n", where="f")[0] == parse_document("'9': a\n", where="f")[0] == {"9": "a"}
    with pytest.raises(ConfigError, match="f:2: the key '9' stands twice, first on line 1"):
        parse_document("9: a\n'9': b\n", where="f")


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        1e-4,
        1.5e-7,
        1e16,
        1e22,
        123456.789,
        -2.5e-9,
        5e-324,
        1.7976931348623157e308,
        0.0,
        3.0,
        0.00012345678901234567,
    ],
)
def test_floats_survive_printing(value: float) -> None:
    found = parse_value(format_value(value), where="f")
    assert type(found) is float
    assert found == value


def test_small_floats_are_printed_short() -> None:
    assert [format_value(value) for value in (1e-4, 1e-5, 1.5e-8, 0.001, 0.25)] == [
        "1e-4",
        "1e-5",
        "1.5e-8",
        "0.001",
        "0.25",
    ]


def test_any_text_survives_printing() -> None:
    letters = "ab01 :#,[]{}&*!|>'\"%@`-?~=.\\/\n\t\r_\0\x1b\x7f\x85\u2028é語😀"
    pieces = [*letters, "null", "true", "yes", "1e-5", "- ", ": ", " #"]
    draw = numpy_stream(7, "yaml text")
    seen = set()
    for _ in range(1500):
        text = "".join(pieces[index] for index in draw.integers(len(pieces), size=draw.integers(7)))
        seen.add(text)
        nested = {"list": [text, {text: text}], "key": text}
        assert parse_value(format_value(text), where="f") == text
        assert parse_value(format_value(nested), where="f") == nested
        block = f"key: {format_value(text)}  # meaning\nlist:\n  - {format_value([text])}\n"
        assert parse_document(block, where="f")[0] == {"key": text, "list": [[text]]}
    assert len(seen) > 1000
