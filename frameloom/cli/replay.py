"""Start the run again that made an export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="an export, a .safetensors file of one, or a run folder")],
    out: Annotated[Path | None, typer.Option(help="write the recipe here; default: NAME.yaml")] = None,
    name: Annotated[str | None, typer.Option(help="name of the new run; default: the old one with -replay")] = None,
    start: Annotated[bool, typer.Option("--start", help="train at once instead of printing the command")] = False,
) -> None:
    """Write the recipe of the run that made FOLDER, say what has changed since, and how to start it.

    Example: frameloom replay my-model

    Example: frameloom replay runs/my-run/exports/diffusers --name again --start
    """
    from frameloom.train.replay import find_changes, read_replay, write_recipe

    found = read_replay(folder, context.args, name=name)
    file = out or Path(f"{found.recipe.name}.yaml")
    write_recipe(found, file)
    print(f"recipe: {file}")
    for change in find_changes(found):
        print(f"changed: {change}")
    if not start:
        print(f"start it: frameloom train {file}")
        return
    from frameloom.config.checks import check_files
    from frameloom.train.run import train

    check_files(found.recipe)
    print(f"done: {train(found.recipe)}")
