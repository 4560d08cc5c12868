"""Train or fine-tune what a recipe describes; go on where an earlier start of it stopped."""

from __future__ import annotations

from typing import Annotated

import typer


def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help="a recipe file, or the name of a shipped one (`frameloom recipe list`)")
    ],
) -> None:
    """Train what RECIPE describes; any key can follow with dots.

    Example: frameloom train shapes/demo --optim.lr 1e-4 --train.steps 2000
    """
    from frameloom.config.checks import check_files
    from frameloom.config.load import load_recipe

    resolved = load_recipe(recipe, context.args)
    check_files(resolved)
    from frameloom.train.loop import train as run_training

    folder = run_training(resolved)
    print(f"done: {folder}")
    if resolved.task == "denoiser":
        print(f'sample it: frameloom sample {folder} --prompt "…"')
