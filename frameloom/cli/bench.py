"""Run a measured comparison and print its numbers."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Protocol

import typer

from frameloom.core.errors import ConfigError

# Module and function of each comparison, and how many rounds it takes unless told.
COMPARISONS = {
    "skiparse": ("frameloom.bench.skiparse", "compare_skiparse", 9),
    "step": ("frameloom.bench.step", "compare_step", 100),
    "objective": ("frameloom.bench.objective", "compare_objectives", 40),
    "plan": ("frameloom.bench.plan", "compare_plan", 3),
    "scan": ("frameloom.bench.scan", "compare_scan", 5),
    "decode": ("frameloom.bench.decode", "compare_decode", 5),
    "cache": ("frameloom.bench.cache", "compare_cache", 5),
    "vae": ("frameloom.bench.vae", "compare_vaes", 5),
    "save": ("frameloom.bench.save", "compare_save", 5),
    "cluster": ("frameloom.bench.cluster", "compare_cluster", 3),
}
_TAKE_FILES = ("scan", "decode")


class Result(Protocol):
    """What every comparison gives."""

    def describe(self) -> list[str]: ...

    def to_json(self) -> dict[str, object]: ...


def bench(
    name: Annotated[str, typer.Argument(help=f"which comparison: {', '.join(COMPARISONS)}")] = "step",
    rounds: Annotated[int | None, typer.Option(help="how often each side is measured", min=3)] = None,
    files: Annotated[list[Path] | None, typer.Option("--file", help="measure on this clip; repeatable")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measure ours against the plain way, in turns within one run; only the ratio means something.

    Example: frameloom bench step
    """
    if name not in COMPARISONS:
        raise ConfigError(f"there is no benchmark '{name}'; choose one of: {', '.join(COMPARISONS)}")
    module, function, usual_rounds = COMPARISONS[name]
    if files and name not in _TAKE_FILES:
        raise ConfigError(f"--file: '{name}' makes its own data; files can be given to {' and '.join(_TAKE_FILES)}")
    more = {"clips": files} if files else {}
    found: Result = getattr(import_module(module), function)(rounds or usual_rounds, **more)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    for line in found.describe():
        print(line)
