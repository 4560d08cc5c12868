"""All comparisons in the order of the table, each in its own process.

A comparison is a function that takes settings and gives rows as they are found. In its own process its memory,
threads and allocator are its alone, and one that dies or hangs costs no row of another.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness import BenchSettings, Row, Work, compare_times, end_with_parent, measure_or_skip, take_turns
from frameloom.core.device import keep_freed_memory

TIME_LIMIT_S = 600.0
_QUICK_ROUNDS = 2
_NO_TORCH = (
    "import sys; sys.argv = ['frameloom', '--help']; import frameloom.cli.main as m; print('torch' in sys.modules)"
)


@dataclass(frozen=True)
class Topic:
    """`rounds` is how often each side is measured unless told; `target` is the module:function that measures."""

    rounds: int
    about: str
    target: str
    takes_files: bool = False


TOPICS = {
    "start": Topic(5, "start-up of the command", "benchmarks.topics:measure_start"),
    "model": Topic(
        9, "training step of every family, tiny and about 30 million parameters", "benchmarks.model:measure"
    ),
    "compile": Topic(7, "training step with compiled blocks", "benchmarks.model:measure_compiled"),
    "step": Topic(200, "training step of our loop against a bare one and that of scripts", "benchmarks.step:measure"),
    "objective": Topic(20, "noise, target, weights and masks beside a bare step", "benchmarks.objective:measure"),
    "recompute": Topic(2, "memory and time of a step by recompute", "benchmarks.recompute:measure"),
    "skiparse": Topic(5, "skiparse against full attention", "benchmarks.skiparse:measure"),
    "sequence": Topic(3, "bytes sent in sequence parallelism against the formula", "benchmarks.sequence:measure"),
    "sample": Topic(3, "solver steps per second", "benchmarks.sample:measure"),
    "vae": Topic(3, "autoencoders", "benchmarks.vae:measure"),
    "decode": Topic(5, "reading a clip", "benchmarks.decode:measure", takes_files=True),
    "loader": Topic(2, "reading batches with worker processes", "benchmarks.loader:measure"),
    "scan": Topic(5, "reading headers", "benchmarks.decode:measure_scan", takes_files=True),
    "plan": Topic(3, "the plan of an epoch", "benchmarks.plan:measure"),
    "cache": Topic(5, "reading and writing caches, training from them", "benchmarks.cache:measure"),
    "save": Topic(12, "saving and resuming", "benchmarks.save:measure"),
    "cluster": Topic(2, "plan, shares and agreement of thousands of processes", "benchmarks.cluster:measure"),
}


def choose_settings(name: str, *, rounds: int | None, is_quick: bool, is_alone: bool) -> BenchSettings:
    usual = _QUICK_ROUNDS if is_quick else TOPICS[name].rounds
    return BenchSettings(rounds or usual, is_quick, is_alone)


def measure_here(name: str, bench: BenchSettings, files: Sequence[Path] = ()) -> Iterator[Row]:
    """The rows of one comparison, in this process."""

    def measure() -> Iterator[Row]:
        keep_freed_memory()  # as our commands do on the CPU; here both sides have it
        module_name, _, function_name = TOPICS[name].target.partition(":")
        function = getattr(import_module(module_name), function_name)
        rows: Iterator[Row] = function(bench, clips=files) if files else function(bench)
        return rows

    yield from measure_or_skip(name, name, measure)


def measure_apart(
    name: str, bench: BenchSettings, files: Sequence[Path] = (), *, limit_s: float = TIME_LIMIT_S
) -> Iterator[Row]:
    """The same in its own process, which may be silent for `limit_s` at most."""
    yield from run_apart(_serve, (name, bench, list(files)), name, limit_s)


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


def _serve(connection: Connection, name: str, bench: BenchSettings, files: Sequence[Path]) -> None:
    end_with_parent()
    for row in measure_here(name, bench, files):
        connection.send(row)
    connection.send(None)
    connection.close()


def measure_start(bench: BenchSettings) -> Iterator[Row]:
    """How long the command takes to print something: `frameloom --help` imports no torch."""
    yield from measure_or_skip("start", "frameloom --help", _measure_start, bench)


def _measure_start(bench: BenchSettings) -> Iterator[Row]:
    calls = {
        "ours": _call(("-m", "frameloom", "--help")),
        "show": _call(("-m", "frameloom", "recipe", "show", "shapes/demo")),
        "other": _call(("-c", "import torch")),
        "python": _call(("-c", "pass")),
    }
    times = take_turns(calls, bench.rounds, warmup=bench.pick(1, 0))
    done = subprocess.run([sys.executable, "-c", _NO_TORCH], capture_output=True, text=True, check=True)
    note = f"torch is {'' if 'True' in done.stdout else 'not '}imported; Python alone {times['python'].wall_s:.3f} s"
    for name, side in (("frameloom --help", "ours"), ("frameloom recipe show, which checks it", "show")):
        yield compare_times("start", name, times[side], times["other"], against="import torch", note=note)


def _call(words: Sequence[str]) -> Work:
    return lambda: subprocess.run([sys.executable, *words], capture_output=True, check=True)
