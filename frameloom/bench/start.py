"""How long the command takes to say something: `frameloom --help` imports no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence

from frameloom.bench.harness import Effort, Row, Work, attempt, compare_times, take_turns

_OURS = ("-m", "frameloom")
_NO_TORCH = (
    "import sys; sys.argv = ['frameloom', '--help']; import frameloom.cli.main as m; print('torch' in sys.modules)"
)


def measure(effort: Effort) -> Iterator[Row]:
    yield from attempt("start", "frameloom --help", _measure, effort)


def _measure(effort: Effort) -> Iterator[Row]:
    calls = {
        "ours": _call((*_OURS, "--help")),
        "show": _call((*_OURS, "recipe", "show", "shapes/demo")),
        "other": _call(("-c", "import torch")),
        "python": _call(("-c", "pass")),
    }
    times = take_turns(calls, effort.rounds, warmup=effort.pick(1, 0))
    done = subprocess.run([sys.executable, "-c", _NO_TORCH], capture_output=True, text=True, check=True)
    note = f"torch is {'' if 'True' in done.stdout else 'not '}imported; Python alone {times['python'].wall_s:.3f} s"
    for name, side in (("frameloom --help", "ours"), ("frameloom recipe show, which checks it", "show")):
        yield compare_times("start", name, times[side], times["other"], against="import torch", note=note)


def _call(words: Sequence[str]) -> Work:
    return lambda: subprocess.run([sys.executable, *words], capture_output=True, check=True)
