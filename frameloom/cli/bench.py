"""Run a measured comparison and print its numbers."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from frameloom.core.errors import ConfigError

NAMES = ("step",)


def bench(
    name: Annotated[str, typer.Argument(help=f"which comparison: {', '.join(NAMES)}")] = "step",
    rounds: Annotated[int, typer.Option(help="how often each side is measured", min=3)] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measure ours against the plain way, in turns within one run; only the ratio means something.

    Example: frameloom bench step
    """
    if name not in NAMES:
        raise ConfigError(f"there is no benchmark '{name}'; choose one of: {', '.join(NAMES)}")
    from frameloom.bench.step import compare_step

    found = compare_step(rounds)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    print(f"{found.name}, {found.rounds} rounds in turn, medians")
    print(f"  ours   {found.ours_s * 1e3:8.1f} ms   processor {found.ours_cpu_s * 1e3:8.1f} ms")
    print(f"  plain  {found.plain_s * 1e3:8.1f} ms   processor {found.plain_cpu_s * 1e3:8.1f} ms")
    print(f"  our loop costs {found.overhead:+.1%} (processor {found.ours_cpu_s / found.plain_cpu_s - 1:+.1%})")
