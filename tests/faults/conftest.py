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

_NUMBERED = re.compile(r"test_(\d\d)_")


def find_row(name: str) -> int | None:
    """The row that a test is named for: `test_06_every_flip_is_noticed` gives 6."""
    found = _NUMBERED.match(name)
    return int(found.group(1)) if found else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        row = find_row(item.name) if item.path.parent == Path(__file__).parent else None
        if row is not None:
            item.extra_keyword_matches.add(f"row_{row:02d}")


class Tally:
    """Faults of one test and its row, all survived if the test passes. The list travels with the test's report."""

    def __init__(self, row: int) -> None:
        self.numbers = [row, 0]

    def inject(self, count: int = 1) -> None:
        self.numbers[1] += count


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    row = find_row(request.node.name)
    assert row is not None, "a test that counts faults is named for its row"
    counted = Tally(row)
    request.node.user_properties.append((PROPERTY, counted.numbers))
    return counted


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
