"""Slips of the pen, made by the program: no key and no byte of a recipe can be wrong in a way that nobody explains."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frameloom.config.load import load_recipe, recipe_from_dict
from frameloom.config.tree import walk
from frameloom.core.errors import ConfigError
from frameloom.core.random import numpy_stream


def edits(word: str) -> Iterator[str]:
    """Every word one slip away: two neighbours swapped, a letter dropped, doubled, or in the other case."""
    for i in range(len(word)):
        yield word[:i] + word[i + 1 :]
        yield word[: i + 1] + word[i:]
        yield word[:i] + word[i].swapcase() + word[i + 1 :]
        if i + 1 < len(word):
            yield word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def test_one_slip_in_any_key_is_refused_and_the_right_key_named() -> None:
    start: dict[str, Any] = {
        "name": "tiny",
        "task": "denoiser",
        "vae": {"weights": "w"},
        "data": {"manifest": "m", "buckets": {"64px": {"9": [1.0, 4]}}, "where": {"split": "train"}},
        "text": {"encoders": [{"name": "minilm"}]},
        "train": {"steps": 100, "ema": {}},
        "optim": {"schedule": {}},
        "validation": {"where": {"split": "val"}},
    }
    recipe_from_dict(start)
    num_slips = num_named = 0
    unnamed = []
    for key in walk():
        for wrong in {*edits(key.path[-1])} - {key.path[-1], ""}:
            value = copy.deepcopy(start)
            section: Any = value
            for part in key.path[:-1]:
                section = section[0] if isinstance(section, list) else section.setdefault(part, {})
            section[wrong] = section.pop(key.path[-1], None)
            with pytest.raises(ConfigError) as caught:
                recipe_from_dict(value)
            num_slips += 1
            if any(f"'{wrong}'; did you mean '{key.path[-1]}'?" in problem for problem in caught.value.problems):
                num_named += 1
            else:
                unnamed.append(f"{key.dotted} as {wrong}: {caught.value}")
    assert num_slips > 1500
    assert num_named >= 0.95 * num_slips, unnamed


def test_damaged_files_are_read_or_refused_and_never_crash(recipe_file: Path) -> None:
    right = recipe_file.read_bytes()
    pieces = [
        b"\n",
        b"  ",
        b"\t",
        b": ",
        b"- ",
        b"[",
        b"]",
        b"{",
        b"}",
        b"&a ",
        b"*a",
        b"!!x ",
        b"'",
        b'"',
        b"\xff",
        b"#",
        b"|",
        b"?",
    ]
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
