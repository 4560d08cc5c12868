"""Make clips, train a tiny text-to-video model on them, sample it and write a page to look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer


def demo(
    context: typer.Context,
    folder: Annotated[
        Path | None, typer.Option(help="where everything is written; runs/demo or runs/demo-long if not given")
    ] = None,
    long: Annotated[
        bool,
        typer.Option("--long", help="train for an hour instead of ten minutes: nearly every prompt comes out right"),
    ] = False,
) -> None:
    """Train a text-to-video model from nothing in minutes; interrupted, it goes on where it was.

    Example: frameloom demo
    """
    from frameloom.train.demo import LONG, SHORT, run_demo

    plan = LONG if long else SHORT
    run_demo(replace(plan, folder=folder or plan.folder, overrides=tuple(context.args)), print)
