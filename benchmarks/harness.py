"""How everything is measured: sides take turns within one run, medians of wall and processor time, one kind of row.

Each side goes first in every other round, after rounds that warm up and do not count. A ratio is the median of the
rounds' own ratios, which a busy machine disturbs least. Processor time is that of this process with all its threads and
of children that have ended. A side may run in its own process (`IsolatedProcess`), as its users would start it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from frameloom.core.device import keep_freed_memory

Work = Callable[[], object]

# What is measured beside ours comes with the extra `bench` and is imported when it is needed: import name -> name for
# pip.
PACKAGES = {
    "accelerate": "accelerate",
    "cv2": "opencv-python-headless",
    "decord": "decord",
    "diffusers": "diffusers",
    "pandas": "pandas",
    "torchdata": "torchdata",
}
_ANSWER_LIMIT_S = 300.0
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in prctl.h
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 1 << 16  # M_MMAP_THRESHOLD in malloc.h, and its value while peaks are measured


class MissingBaseline(Exception):
    """What a comparison is made with is not installed."""


def load_baseline(module: str) -> Any:
    """The module, or MissingBaseline with the package that brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = PACKAGES[module.partition(".")[0]]
        raise MissingBaseline(f"{package} is not installed; pip install -e '.[bench]'") from error


@dataclass(frozen=True)
class BenchSettings:
    """How often each side is measured; a quick run takes small inputs, and its numbers mean nothing."""

    rounds: int
    is_quick: bool = False
    is_alone: bool = False
    """one comparison was asked for by name: it may go into detail"""

    def pick(self, usual: Any, small: Any) -> Any:
        return small if self.is_quick else usual


@dataclass(frozen=True)
class Contender:
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

    Numbers are in base units (seconds, bytes, items per second, shares). `at` is an axis and a position on it, for rows
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


def take_turns(
    sides: Mapping[str, Work | Contender | IsolatedProcess], rounds: int, warmup: int = 1
) -> dict[str, Times]:
    """Time every side `rounds` times, in turns."""
    all_sides: dict[str, Contender | IsolatedProcess] = {
        name: Contender(side) if callable(side) else side for name, side in sides.items()
    }
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


def measure_or_skip(
    topic: str, name: str, measure: Callable[..., Row | Iterable[Row]], *arguments: object
) -> Iterator[Row]:
    """The rows of one case; if it fails, one row that says so, and the others go on."""
    try:
        found = measure(*arguments)
        yield from [found] if isinstance(found, Row) else found
    except MissingBaseline as error:
        yield Row(topic, name, missing=str(error))
    except Exception as error:
        traceback.print_exc()
        yield Row(topic, name, problem=" ".join(f"{type(error).__name__}: {error}".split()))


class IsolatedProcess(AbstractContextManager["IsolatedProcess"]):
    """A process that builds one side after another; `keeps_memory` gives it the memory setting of our commands.

    What our commands set for their process, above all how it keeps memory, is then not lent to the other side. Between
    its turns the process waits and takes no processor time.
    """

    def __init__(self, *, keeps_memory: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve_sides, args=(theirs, keeps_memory), daemon=True)
        self._process.start()
        theirs.close()

    def build(self, build: Callable[..., Work], *arguments: object) -> IsolatedProcess:
        """Take turns from now on with what `build(*arguments)` makes there; the side before is gone."""
        self._ask((build, arguments))
        return self

    def time(self) -> tuple[float, float]:
        """One turn, timed there."""
        wall, cpu = self._ask(None)
        return wall, cpu

    def _ask(self, message: object) -> Any:
        self._connection.send(message)
        if not self._connection.poll(_ANSWER_LIMIT_S):
            self._process.terminate()  # a late answer would be taken for that of the next question
            raise TimeoutError(f"the process of the other side gave no answer for {_ANSWER_LIMIT_S:.0f} s")
        try:
            return self._connection.recv()
        except EOFError as error:
            self._process.join()
            raise RuntimeError(
                f"the process of the other side ended with exit code {self._process.exitcode}; its trace is above"
            ) from error

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.terminate()


def _serve_sides(connection: Connection, keeps_memory: bool) -> None:
    """Build what a message describes, run it for an empty one; an error ends the process with its trace."""
    end_with_parent()
    if keeps_memory:
        keep_freed_memory()
    side: Contender | None = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        if message is None:
            assert side is not None, "nothing was built yet"
            connection.send(side.time())
        else:
            side = None  # its memory is free before the next one takes some
            build, arguments = message
            side = Contender(build(*arguments))
            connection.send(True)


def end_with_parent() -> None:
    """Have the system kill this process when the one that started it ends, in whatever way (only on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def can_measure_peak() -> bool:
    """Linux with glibc tells the peak of a process, and lets it be set back."""
    return sys.platform == "linux" and _RESET.exists() and hasattr(ctypes.CDLL(None), "malloc_trim")


def measure_peak_bytes(work: Callable[[], object]) -> int:
    """Growth of resident memory at its peak, kernels' scratch space included. Measure times before, not after:
    from here on large blocks go back to the system when they are freed, which makes peaks exact and allocation slow."""
    _return_freed_memory()
    work()  # what a first call sets up for good does not count
    _return_freed_memory()
    _RESET.write_text("5")  # sets the peak back to what is resident now
    before = _read_status("VmRSS:")
    work()
    return max(0, _read_status("VmHWM:") - before)


def _return_freed_memory() -> None:
    """Give free memory back to the system now, and from here on every large block when it is freed."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
    libc.malloc_trim(0)


def _read_status(name: str) -> int:
    words = _STATUS.read_text().split()
    return int(words[words.index(name) + 1]) * 1024
