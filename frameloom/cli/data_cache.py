"""Encode the clips and captions of a recipe once, so that training reads latents instead of videos."""

from __future__ import annotations

from typing import Annotated

import typer


def cache(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="a denoiser recipe whose data.cache names the folders to write")],
) -> None:
    """Write the latent and text caches that RECIPE names in data.cache.

    Example: frameloom data cache shapes/demo
    """
    from frameloom.config.checks import check_files
    from frameloom.config.load import load_recipe

    resolved = load_recipe(recipe, context.args)
    check_files(resolved, skip_caches=True)
    from frameloom.train.caching import write_caches

    for line in write_caches(resolved):
        print(line)
