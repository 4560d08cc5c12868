"""Make clips, train a tiny text-to-video model on them, sample it and write a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    context: typer.Context,
    folder: Annotated[Path, typer.Option(help="where everything is written")] = Path("runs/demo"),
) -> None:
    """Train a text-to-video model from nothing in minutes; interrupted, it goes on where it was.

    Example: frameloom demo
    """
    from frameloom.train.demo import DemoPlan, run_demo

    run_demo(DemoPlan(folder=folder, overrides=tuple(context.args)), print)
