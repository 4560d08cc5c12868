"""A side elsewhere has a process of its own, is timed there, and its failure is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from frameloom.bench.elsewhere import Elsewhere
from frameloom.bench.harness import Work, take_turns


def build_burn(place: Path, amount: int) -> Work:
    def burn() -> None:
        with place.open("a") as file:
            file.write(f"{os.getpid()}\n")
        sum(number * number for number in range(amount))

    return burn


def build_failure() -> Work:
    raise ValueError("cannot be built")


@pytest.fixture(scope="module")
def place() -> Iterator[Elsewhere]:
    with Elsewhere() as place:
        yield place


def test_a_side_is_run_and_timed_in_another_process(place: Elsewhere, tmp_path: Path) -> None:
    much = place.build(build_burn, tmp_path / "much", 3_000_000)
    times = take_turns({"here": build_burn(tmp_path / "here", 10), "much": much}, 2)
    pids = {name: set((tmp_path / name).read_text().split()) for name in times}
    assert pids["here"] == {str(os.getpid())} and len(pids["much"]) == 1 and pids["here"] != pids["much"]
    assert len((tmp_path / "much").read_text().split()) == 3, "one turn that warms up and two that count"
    assert times["much"].cpu_s > 0.02 > times["here"].cpu_s


def test_a_side_takes_the_place_of_the_one_before(place: Elsewhere, tmp_path: Path) -> None:
    place.build(build_burn, tmp_path / "first", 10)
    place.build(build_burn, tmp_path / "second", 10).time()
    assert not (tmp_path / "first").exists() and (tmp_path / "second").is_file()


def test_a_side_that_cannot_be_built_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with Elsewhere() as place, pytest.raises(RuntimeError, match="ended with exit code 1"):
        place.build(build_failure)
    assert "ValueError: cannot be built" in capfd.readouterr().err
