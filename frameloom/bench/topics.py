"""All comparisons, in the order of the table, and a process of its own for each.

A comparison is a module with `measure(effort)`, which gives rows as they are found. In a process of its own its memory,
threads and allocator are its alone, and one that dies or hangs costs no row of another.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from frameloom.bench.harness import Effort, Row, attempt
from frameloom.core.host_memory import keep_freed_memory
from frameloom.core.processes import end_with_parent

TIME_LIMIT_S = 600.0
_QUICK_ROUNDS = 2


@dataclass(frozen=True)
class Topic:
    """`rounds` is how often each side is measured unless told."""

    rounds: int
    about: str
    takes_files: bool = False


TOPICS = {
    "start": Topic(5, "start-up of the command"),
    "model": Topic(9, "training step of every family, tiny and about 30 million parameters"),
    "compile": Topic(7, "training step with compiled blocks"),
    "kernels": Topic(25, "kernels in C++ against torch's"),
    "step": Topic(200, "training step of our loop against a bare one and that of scripts"),
    "objective": Topic(20, "noise, target, weights and masks beside a bare step"),
    "recompute": Topic(2, "memory and time of a step by recompute"),
    "skiparse": Topic(5, "skiparse against full attention"),
    "sequence": Topic(3, "bytes sent in sequence parallelism against the formula"),
    "sample": Topic(3, "solver steps per second"),
    "vae": Topic(3, "autoencoders"),
    "decode": Topic(5, "reading a clip", takes_files=True),
    "loader": Topic(2, "reading batches with worker processes"),
    "scan": Topic(5, "reading headers", takes_files=True),
    "plan": Topic(3, "the plan of an epoch"),
    "cache": Topic(5, "reading and writing caches, training from them"),
    "save": Topic(12, "saving and resuming"),
    "cluster": Topic(2, "plan, shares and agreement of thousands of processes"),
}


def choose_effort(name: str, *, rounds: int | None, is_quick: bool, is_alone: bool) -> Effort:
    usual = _QUICK_ROUNDS if is_quick else TOPICS[name].rounds
    return Effort(rounds or usual, is_quick, is_alone)


def measure_here(name: str, effort: Effort, files: Sequence[Path] = ()) -> Iterator[Row]:
    """The rows of one comparison, in this process."""

    def measure() -> Iterator[Row]:
        keep_freed_memory()  # as our commands do on the CPU; here both sides have it
        module = import_module(f"frameloom.bench.{name}")
        rows: Iterator[Row] = module.measure(effort, clips=files) if files else module.measure(effort)
        return rows

    yield from attempt(name, name, measure)


def measure_apart(
    name: str, effort: Effort, files: Sequence[Path] = (), *, limit_s: float = TIME_LIMIT_S
) -> Iterator[Row]:
    """The same in a process of its own, which may be silent for `limit_s` at most."""
    yield from run_apart(_serve, (name, effort, list(files)), name, limit_s)


def run_apart(serve: Callable[..., None], arguments: tuple[object, ...], name: str, limit_s: float) -> Iterator[Row]:
    """Rows that `serve(connection, *arguments)` sends from a new process; a last None says that it is done."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(sender, *arguments))
    process.start()
    sender.close()
    try:
        while receiver.poll(limit_s):
            row = receiver.recv()
            if row is None:
                process.join(10)
                return
            yield row
        yield Row(name, name, problem=f"no answer for {limit_s:.0f} s; it was stopped")
    except EOFError:
        process.join()
        yield Row(name, name, problem=f"its process ended with exit code {process.exitcode}")
    finally:
        if process.is_alive():
            process.terminate()
            process.join()
        receiver.close()


def _serve(connection: Connection, name: str, effort: Effort, files: Sequence[Path]) -> None:
    end_with_parent()
    for row in measure_here(name, effort, files):
        connection.send(row)
    connection.send(None)
    connection.close()
