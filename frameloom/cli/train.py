"""Train or fine-tune what a recipe describes; go on where an earlier start of it stopped."""

from __future__ import annotations

from typing import Annotated

import typer

AcceptRecipe = Annotated[
    bool,
    typer.Option("--accept-recipe-change", help="go on with a recipe that differs in what is learnt"),
]
AcceptData = Annotated[
    bool, typer.Option("--accept-data-change", help="go on with a manifest that is not that of the checkpoint")
]
DataPosition = Annotated[
    int | None,
    typer.Option("--data-position", min=0, help="go on at this sample of the checkpoint's epoch; 0: at its start"),
]


def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help="a recipe file, or the name of a shipped one (`frameloom recipe list`)")
    ],
    accept_recipe_change: AcceptRecipe = False,
    accept_data_change: AcceptData = False,
    data_position: DataPosition = None,
) -> None:
    """Train what RECIPE describes; any key can follow with dots.

    A run that was started before goes on from its newest checkpoint.

    Example: frameloom train shapes/demo --optim.lr 1e-4 --train.steps 2000

    Example: frameloom train my.yaml --data-position 0
    """
    from frameloom.config.checks import check_files
    from frameloom.config.load import load_with_places
    from frameloom.config.parallel_checks import check_world
    from frameloom.core.errors import FrameloomError
    from frameloom.core.ranks import read_ranks

    ranks = read_ranks()
    try:
        resolved, places = load_with_places(recipe, context.args)
        check_files(resolved, places=places)
        check_world(resolved, ranks.num_ranks)
    except FrameloomError as error:
        if ranks.local_rank == 0:
            raise
        # All processes of a host find the same; one of them tells it.
        raise typer.Exit(error.exit_code) from error
    from frameloom.train.resuming import ResumeChoices
    from frameloom.train.run import train as run_training

    choices = ResumeChoices(accept_recipe_change, accept_data_change, data_position)
    folder = run_training(resolved, choices)
    if not ranks.is_first:
        return
    print(f"done: {folder}")
    if resolved.task == "denoiser":
        print(f'sample it: frameloom sample {folder} --prompt "…"')
