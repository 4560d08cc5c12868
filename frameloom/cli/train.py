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
    from frameloom.config.parallel_checks import check_world
    from frameloom.core.errors import FrameloomError
    from frameloom.core.ranks import read_ranks

    ranks = read_ranks()
    try:
        resolved = load_recipe(recipe, context.args)
        check_files(resolved)
        check_world(resolved, ranks.num_ranks)
    except FrameloomError as error:
        if ranks.local_rank == 0:
            raise
        # All processes of a host find the same; one of them tells it.
        raise typer.Exit(error.exit_code) from error
    from frameloom.train.loop import train as run_training
    from frameloom.train.parallel.voice import SilentStop

    try:
        folder = run_training(resolved)
    except SilentStop as stop:
        raise typer.Exit(stop.exit_code) from stop
    if not ranks.is_first:
        return
    print(f"done: {folder}")
    if resolved.task == "denoiser":
        print(f'sample it: frameloom sample {folder} --prompt "…"')
