"""Commands about recipes: check, show, list, schema, reference."""

from __future__ import annotations

from typing import Annotated

import typer

Source = Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe file, or the name of a shipped recipe")]


def check(
    ctx: typer.Context,
    recipe: Source,
    skip_files: Annotated[bool, typer.Option("--skip-files", help="do not look whether the named files exist")] = False,
) -> None:
    """Say everything that is wrong with a recipe: unknown keys, wrong values, impossible combinations, missing files.

    Nothing is loaded and nothing is written. Exit code 0 means that a run could start.
    """
    from frameloom.config.checks import check_files
    from frameloom.config.load import load_with_places
    from frameloom.data.filters import check_recipe_filters

    loaded, places = load_with_places(recipe, ctx.args)
    check_recipe_filters(loaded)
    if not skip_files:
        check_files(loaded, places=places)
    trained = f"{loaded.model.family}/{loaded.model.size}"
    if loaded.task == "autoencoder":
        trained = f"{loaded.vae.name}/{loaded.vae.size}"
    shapes = f"shapes of policy {loaded.data.policy}"
    if loaded.data.buckets:
        shapes = f"{sum(len(cells) for cells in loaded.data.buckets.values())} bucket(s)"
    length = f"{loaded.train.epochs} epoch(s)" if loaded.train.steps is None else f"{loaded.train.steps} steps"
    print(f"ok: {loaded.name} trains {loaded.task} {trained} for {length} on {shapes}")


def show(ctx: typer.Context, recipe: Source) -> None:
    """Print a recipe as it would run: inheritance and overrides applied, every default filled in and explained."""
    from frameloom.config.load import load_recipe
    from frameloom.config.render import render_yaml

    print(render_yaml(load_recipe(recipe, ctx.args)), end="")


def list_recipes() -> None:
    """List the recipes that come with the package; use a name wherever a recipe is asked for."""
    from frameloom.config.load import shipped_recipes

    recipes = shipped_recipes()
    width = max((len(name) for name, _ in recipes), default=0)
    for name, title in recipes:
        print(f"{name:<{width}}  {title}".rstrip())


def schema() -> None:
    """Print the JSON schema of a recipe file; editors use it to complete and check keys."""
    import json

    from frameloom.config.render import json_schema

    print(json.dumps(json_schema(), indent=2))


def reference() -> None:
    """Print the reference of all keys as Markdown; this is docs/recipe.md."""
    from frameloom.config.render import render_reference

    print(render_reference(), end="")
