"""C++ that is compiled on first use: kept, made anew when something changed, and never in the way."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
from pathlib import Path

import pytest

from frameloom.core import native

ADD = '#include "numbers.h"\nextern "C" Number add(Number one, Number other) { return one + other; }'

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, native._COMPILERS)), reason="no C++ compiler here")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    native.load_native.cache_clear()
    source = tmp_path / "sums" / "add.cpp"
    source.parent.mkdir()
    (source.parent / "numbers.h").write_text("typedef int Number;\n")
    source.write_text(ADD)
    return source


def list_kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kept").rglob("*.so"))


@needs_compiler
def test_functions_are_compiled_once_and_kept(source: Path, tmp_path: Path) -> None:
    first = native.load_native(source.parent)
    assert first is not None and first.add(2, 3) == 5
    (kept,) = list_kept(tmp_path)
    made_at = kept.stat().st_mtime_ns
    native.load_native.cache_clear()
    again = native.load_native(source.parent)
    assert again is not None and again.add(4, 5) == 9
    assert [path.stat().st_mtime_ns for path in list_kept(tmp_path)] == [made_at]


@needs_compiler
@pytest.mark.parametrize("name", ["add.cpp", "numbers.h"])
def test_a_changed_source_is_compiled_anew(source: Path, tmp_path: Path, name: str) -> None:
    assert native.load_native(source.parent) is not None
    changes = {"add.cpp": ("one + other", "one - other"), "numbers.h": ("int", "signed char")}
    changed_file = source.parent / name
    changed_file.write_text(changed_file.read_text().replace(*changes[name]))
    native.load_native.cache_clear()
    changed = native.load_native(source.parent)
    assert changed is not None
    changed.add.restype = ctypes.c_byte if name == "numbers.h" else ctypes.c_int
    assert changed.add(100, 100) == {"add.cpp": 0, "numbers.h": -56}[name]
    assert len(list_kept(tmp_path)) == 2


@needs_compiler
def test_what_does_not_compile_is_told_and_leaves_nothing(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("int add(int one")
    assert native.load_native(source.parent) is None
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "sums could not be compiled" in record.getMessage() and "error" in record.getMessage()
    assert not [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]


def test_without_a_compiler_nothing_is_said(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert native.load_native(source.parent) is None
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


def test_a_compiler_that_is_not_there_is_told(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert native.load_native(source.parent) is None
    assert "/nowhere/c++" in caplog.text


@needs_compiler
def test_code_of_somebody_else_is_not_run(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**31)
    assert native.load_native(source.parent) is None
    assert "belongs to somebody else" in caplog.text
