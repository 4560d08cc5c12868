"""What the tests of the fault table share: rows and counts of each test, and processes that start warm."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from frameloom.training.loop import Trainer
from frameloom.training.run.folder import RunFolder
from frameloom.training.train import build_trainer
from tests.conftest import World
from tests.faults.table import PROPERTY
from tests.faults.warm import Warm, warm_parent

_NUMBERED = re.compile(r"^test((?:_\d\d)+)_")


def rows_of(path: Path) -> list[int]:
    """The rows that a file is named for: `test_12_13_resume.py` gives 12 and 13."""
    found = _NUMBERED.match(path.name)
    return [int(number) for number in found.group(1).split("_")[1:]] if found else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.extra_keyword_matches.update(f"row_{row:02d}" for row in rows_of(item.path))


class Tally:
    """Faults of one test and one row, all survived if the test passes. The list travels with the test's report."""

    def __init__(self, row: int) -> None:
        self.numbers = [row, 0]

    def inject(self, count: int = 1) -> None:
        self.numbers[1] += count


@pytest.fixture
def tally_of(request: pytest.FixtureRequest) -> Callable[[int], Tally]:
    def begin(row: int) -> Tally:
        counted = Tally(row)
        request.node.user_properties.append((PROPERTY, counted.numbers))
        return counted

    return begin


@pytest.fixture
def tally(request: pytest.FixtureRequest, tally_of: Callable[[int], Tally]) -> Tally:
    """Counts for the first row of the file's name."""
    return tally_of(rows_of(request.path)[0])


@pytest.fixture(scope="session")
def warm() -> Warm:
    return warm_parent()


@pytest.fixture
def start(world: World) -> Iterator[Callable[..., Trainer]]:
    """Makes trainers that have taken no step; their files are closed in the end."""
    made: list[Trainer] = []

    def build(*overrides: str, **sections: object) -> Trainer:
        folder = RunFolder(world.folder / "run")
        folder.path.mkdir(exist_ok=True)
        made.append(build_trainer(world.recipe(*overrides, **sections), folder, first_step=1))
        return made[-1]

    yield build
    for trainer in made:
        for tracker in trainer.trackers:
            tracker.close()
