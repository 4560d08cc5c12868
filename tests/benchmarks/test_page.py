"""The table as text, as a record, and between the marks of a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

from benchmarks.__main__ import bench
from benchmarks.harness import Row, compare_numbers
from benchmarks.report import (
    BEGIN,
    END,
    format_header,
    format_ratio,
    format_row,
    format_value,
    make_record,
    write_page,
)
from frameloom.core.errors import ConfigError, DataError

ROWS = [
    compare_numbers("plan", f"an epoch of {rows:,} rows", rows * 1e-6, rows * 1e-4, unit="s", at=("rows", rows))
    for rows in (100_000, 1_000_000)
]
FAILED = Row("scan", "clip", problem="DataError: a | b")
MISSING = Row("decode", "clip", missing="decord is not installed")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (2e-6, "s", "2 us"),
        (0.0, "s", "0 ns"),
        (3 * 2**20, "B", "3 MiB"),
        (0.806, "share", "80.6%"),
        (1234.5, "clips/s", "1,234 clips/s"),
        (None, "s", "-"),
    ],
)
def test_numbers_are_short_and_have_a_unit(value: float | None, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_ratios_have_as_many_digits_as_they_deserve() -> None:
    assert [format_ratio(value) for value in (None, 1.2345, 12.345, 1234.5)] == ["-", "1.23x", "12.3x", "1,234x"]


def test_a_line_has_the_numbers_or_the_reason() -> None:
    assert len(format_header()) > 100
    assert "100 ms" in format_row(ROWS[0]) and "100x" in format_row(ROWS[0])
    assert "FAILED: DataError" in format_row(FAILED) and "left out: decord" in format_row(MISSING)


def test_a_page_keeps_its_text_around_the_marks_and_gets_a_picture(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_page(page, make_record([*ROWS, FAILED], is_quick=True))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "an epoch of 100,000 rows" in text and "mean nothing" in text and "a \\| b" in text
    assert "](images/growth-plan-rows.svg)" in text
    drawing = ElementTree.parse(tmp_path / "images" / "growth-plan-rows.svg")
    lines = drawing.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 and all(len(line.attrib["points"].split()) == 2 for line in lines)
    again = page.read_text()
    write_page(page, make_record([*ROWS, FAILED], is_quick=True))
    assert page.read_text() == again


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("no marks")
    with pytest.raises(DataError, match="once each"):
        write_page(page, make_record(ROWS, is_quick=False))
    assert page.read_text() == "no marks"


def test_places_that_cannot_be_written_are_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no marks")
    with pytest.raises(DataError, match="no such page; make it"):
        bench(page=tmp_path / "performence.md")
    with pytest.raises(DataError, match="once each"):
        bench(page=tmp_path / "file")
    with pytest.raises(ConfigError, match=r"--json .*: a folder"):
        bench(json_file=tmp_path)
    with pytest.raises(ConfigError, match=r"--json .* is no folder"):
        bench(json_file=tmp_path / "file" / "bench.json")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        *(({key: None}, f"({key}: ") for key in ("date", "machine", "versions", "quick", "rows")),
        ({"rows": [{"topic": "speed", "name": "clip"}]}, "rows of 'speed', which is no comparison; known: start"),
        ({"rows": [{"topic": "scan", "name": "clip", "ours": "fast"}]}, "(rows.0.ours: "),
        ({"rows": [{"topic": "scan", "name": "clip", "theirs": 1}]}, "theirs"),
    ],
)
def test_a_record_that_no_page_can_be_made_of_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    record, page = make_record(ROWS, is_quick=False) | change, tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    (tmp_path / "r.json").write_text(json.dumps({key: value for key, value in record.items() if value is not None}))
    with pytest.raises(DataError, match=r"r\.json: ") as refused:
        bench(record=tmp_path / "r.json", page=page)
    assert told in str(refused.value) and page.read_text() == f"{BEGIN}\n{END}\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"names": ["step"]}, "TOPIC"),
        ({"rounds": 3}, "--rounds"),
        ({"quick": True, "files": [Path("clip.mp4")]}, "--quick, --file"),
    ],
)
def test_what_would_say_how_to_measure_is_refused_beside_a_record(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    (tmp_path / "r.json").write_text(json.dumps(make_record(ROWS, is_quick=False)))
    with pytest.raises(ConfigError, match=f"--from measures nothing, so {told} would do nothing"):
        bench(record=tmp_path / "r.json", **options)


def test_a_failed_comparison_ends_the_command_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = tmp_path / "bad.json", tmp_path / "good.json"
    bad.write_text(json.dumps(make_record([*ROWS, FAILED], is_quick=True)))
    good.write_text(json.dumps(make_record([*ROWS, MISSING], is_quick=True)))
    with pytest.raises(typer.Exit) as stop:
        bench(record=bad)
    assert stop.value.exit_code == 1 and "1 comparison(s) failed" in capsys.readouterr().err
    copy = tmp_path / "copy.json"
    bench(record=good, json_file=copy)
    assert json.loads(copy.read_text()) == json.loads(good.read_text())
    assert "an epoch of 1,000,000 rows" in capsys.readouterr().out


def test_unknown_names_and_files_for_others_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no benchmark 'speed'; choose from: start, model"):
        bench(["speed"])
    with pytest.raises(ConfigError, match="only decode and scan"):
        bench(["step"], files=[Path("clip.mp4")])
    with pytest.raises(ConfigError, match="only decode and scan"):
        bench(files=[Path("clip.mp4")])
