"""Slips of the pen, made by the program: no key and no byte of a recipe can be wrong in a way that nobody explains."""

from __future__ import annotations

from pathlib import Path

from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import ConfigError
from frameloom.core.random import numpy_stream


def test_damaged_files_are_read_or_refused_and_never_crash(recipe_file: Path) -> None:
    right = recipe_file.read_bytes()
    pieces = b"\n;  ;\t;: ;- ;[;];{;};&a ;*a;!!x ;';\";\xff;#;|;?".split(b";")
    draw = numpy_stream(11, "damaged recipes")
    num_refused = 0
    for _ in range(400):
        text = bytearray(right)
        for _ in range(int(draw.integers(1, 4))):
            start = int(draw.integers(len(text)))
            end = min(len(text), start + int(draw.integers(6)))
            text[start:end] = pieces[int(draw.integers(len(pieces)))] if draw.random() < 0.7 else b""
        recipe_file.write_bytes(bytes(text))
        try:
            load_recipe(recipe_file)
        except ConfigError as error:
            num_refused += 1
            assert all(problem.startswith(str(recipe_file)) for problem in error.problems)
    assert 200 < num_refused < 400
