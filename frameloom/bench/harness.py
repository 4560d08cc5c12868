"""How everything is measured: sides take turns within one run, medians of wall and processor time, one kind of row.

Each side goes first in every other round, after rounds that warm up and do not count. A ratio is the median of the
rounds' own ratios, which a busy machine disturbs least. Processor time is that of this process with all its threads and
of children that have ended.
"""

from __future__ import annotations

import resource
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from frameloom.bench.peers import MissingPeer

Work = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How often each side is measured; a quick run takes small inputs, and its numbers mean nothing."""

    rounds: int
    is_quick: bool = False
    is_alone: bool = False
    """one comparison was asked for by name: it may go into detail"""

    def pick(self, usual: Any, small: Any) -> Any:
        return small if self.is_quick else usual


@dataclass(frozen=True)
class Side:
    """What is timed, and what comes before and after it without being timed."""

    run: Work
    prepare: Work | None = None
    finish: Work | None = None

    def time(self) -> tuple[float, float]:
        """Seconds of wall and of processor time."""
        if self.prepare is not None:
            self.prepare()
        wall, cpu = time.perf_counter(), processor_seconds()
        self.run()
        found = time.perf_counter() - wall, processor_seconds() - cpu
        if self.finish is not None:
            self.finish()
        return found


class Timed(Protocol):
    """A side that says how long a turn of it took."""

    def time(self) -> tuple[float, float]: ...


@dataclass(frozen=True)
class Times:
    """Seconds of each round."""

    walls: tuple[float, ...]
    cpus: tuple[float, ...]

    @property
    def wall_s(self) -> float:
        return statistics.median(self.walls)

    @property
    def cpu_s(self) -> float:
        return statistics.median(self.cpus)

    @classmethod
    def join(cls, parts: Sequence[Times]) -> Times:
        """The rounds of all parts, one after the other."""
        return cls(*(tuple(second for part in parts for second in getattr(part, name)) for name in ("walls", "cpus")))


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio` says how many times better ours is; without another there is none.

    Numbers are in base units (seconds, bytes, items per second, shares). `at` is an axis and a place on it, for rows
    that show how a number grows. A row that could not be measured has a `problem`, or says what is `missing`.
    """

    topic: str
    name: str
    unit: str = "s"
    ours: float | None = None
    other: float | None = None
    against: str = ""
    ratio: float | None = None
    ours_cpu_s: float | None = None
    other_cpu_s: float | None = None
    repeats: int = 0
    better: Literal["less", "more"] = "less"
    note: str = ""
    at: tuple[str, float] | None = None
    missing: str = ""
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Row:
        at = values.get("at")
        return cls(**{**values, "at": None if at is None else (str(at[0]), float(at[1]))})


def take_turns(sides: Mapping[str, Work | Timed], rounds: int, warmup: int = 1) -> dict[str, Times]:
    """Time every side `rounds` times, in turns."""
    all_sides: dict[str, Timed] = {name: Side(side) if callable(side) else side for name, side in sides.items()}
    names = list(all_sides)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        for name in names if number % 2 else reversed(names):
            seconds = all_sides[name].time()
            if number >= warmup:
                found[name].append(seconds)
    return {name: Times(*(tuple(column) for column in zip(*each, strict=True))) for name, each in found.items()}


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def median_ratio(others: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(other / max(mine, 1e-12) for other, mine in zip(others, ours, strict=True))


def compare_times(
    topic: str,
    name: str,
    ours: Times,
    other: Times | None = None,
    *,
    against: str = "",
    items: float = 1.0,
    note: str = "",
    at: tuple[str, float] | None = None,
) -> Row:
    """A row of seconds; with `items` done in each round, of seconds per item."""
    return Row(
        topic,
        name,
        ours=ours.wall_s / items,
        other=None if other is None else other.wall_s / items,
        against=against,
        ratio=None if other is None else median_ratio(other.walls, ours.walls),
        ours_cpu_s=ours.cpu_s / items,
        other_cpu_s=None if other is None else other.cpu_s / items,
        repeats=len(ours.walls),
        note=note,
        at=at,
    )


def compare_rates(
    topic: str,
    name: str,
    ours: Times,
    other: Times | None = None,
    *,
    amount: float,
    unit: str,
    against: str = "",
    note: str = "",
    at: tuple[str, float] | None = None,
) -> Row:
    """A row of `amount` per second of wall time; processor times stay seconds of a round."""
    row = compare_times(topic, name, ours, other, against=against, note=note, at=at)
    assert row.ours is not None
    rates = {"ours": amount / row.ours, "other": None if row.other is None else amount / row.other}
    return Row(**{**vars(row), **rates, "unit": unit, "better": "more"})


def compare_numbers(
    topic: str,
    name: str,
    ours: float,
    other: float | None = None,
    *,
    unit: str,
    against: str = "",
    better: Literal["less", "more"] = "less",
    repeats: int = 1,
    note: str = "",
    at: tuple[str, float] | None = None,
) -> Row:
    """A row of anything else: bytes, shares."""
    ratio = None
    if other is not None and ours and other:
        ratio = other / ours if better == "less" else ours / other
    return Row(topic, name, unit, ours, other, against, ratio, repeats=repeats, better=better, note=note, at=at)


def attempt(topic: str, name: str, measure: Callable[..., Row | Iterable[Row]], *arguments: object) -> Iterator[Row]:
    """The rows of one case; if it fails, one row that says so, and the others go on."""
    try:
        found = measure(*arguments)
        yield from [found] if isinstance(found, Row) else found
    except MissingPeer as error:
        yield Row(topic, name, missing=str(error))
    except Exception as error:
        traceback.print_exc()
        yield Row(topic, name, problem=" ".join(f"{type(error).__name__}: {error}".split()))
