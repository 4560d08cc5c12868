"""Commands about recipes: check, show, list, schema, reference, arguments, objective, import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from frameloom.config.schema.recipe import Recipe


Source = Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe file, or the name of a shipped recipe")]


def check(
    ctx: typer.Context,
    recipe: Source,
    skip_files: Annotated[bool, typer.Option("--skip-files", help="do not check that the named files exist")] = False,
) -> None:
    """Report all problems of a recipe: unknown keys, wrong values, impossible combinations, missing files.

    Loads no model and writes nothing. Exit code 0: a run could start.

    Example: frameloom recipe check my.yaml --optim.lr 1e-5
    """
    from frameloom.config.loading.recipe import load_with_locations
    from frameloom.config.rules.check import check_files
    from frameloom.data.manifest.filters import check_recipe_filters

    loaded, locations = load_with_locations(recipe, ctx.args)
    check_recipe_filters(loaded)
    if not skip_files:
        check_files(loaded, locations=locations)
    trained = f"{loaded.model.family}/{loaded.model.size}"
    if loaded.task == "autoencoder":
        trained = f"{loaded.vae.name}/{loaded.vae.size}"
    shapes = f"shapes of policy {loaded.data.policy}"
    if loaded.data.buckets:
        shapes = f"{sum(len(cells) for cells in loaded.data.buckets.values())} bucket(s)"
    length = f"{loaded.train.epochs} epoch(s)" if loaded.train.steps is None else f"{loaded.train.steps} steps"
    print(f"ok: {loaded.name} trains {loaded.task} {trained} for {length} on {shapes}")


def show(ctx: typer.Context, recipe: Source) -> None:
    """Print a recipe as it would run: inheritance and overrides applied, every default filled in and explained.

    Example: frameloom recipe show shapes/demo-vae --train.steps 100 > my.yaml
    """
    from frameloom.config.loading.recipe import load_recipe
    from frameloom.config.loading.render import render_yaml

    print(render_yaml(load_recipe(recipe, ctx.args)), end="")


def list_recipes() -> None:
    """List the recipes that come with the package; every command that takes a recipe accepts their names.

    Example: frameloom recipe list
    """
    from frameloom.config.loading.recipe import shipped_recipes

    recipes = shipped_recipes()
    width = max((len(name) for name, _ in recipes), default=0)
    for name, title in recipes:
        print(f"{name:<{width}}  {title}".rstrip())


def schema() -> None:
    """Print the JSON schema of a recipe file; editors use it to complete and check keys.

    Example: frameloom recipe schema > recipe.json
    """
    import json

    from frameloom.config.loading.render import json_schema

    print(json.dumps(json_schema(), indent=2))


def reference() -> None:
    """Print the reference of all keys as Markdown; this is docs/recipe.md.

    Example: frameloom recipe reference > docs/recipe.md
    """
    from frameloom.config.loading.render import render_reference

    print(render_reference(), end="")


_MOST_SHAPES = 3


def objective(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe file, or the name of a shipped recipe")],
    out: Annotated[Path | None, typer.Option(help="write the plot too: a page (.html) or a picture (.svg)")] = None,
) -> None:
    """Print density and weight over the noise level, as the objective of RECIPE has them; nothing is loaded.

    Where they depend on the size of a clip, the smallest, a middle and the largest bucket are shown.

    Example: frameloom objective opensora2/image --objective.shift 3 --out objective.html
    """
    from frameloom.builders.objective import build_objective
    from frameloom.config.loading.recipe import load_recipe
    from frameloom.core.errors import ConfigError
    from frameloom.diffusion.noise_levels import profile_objective
    from frameloom.evaluate.reports import format_objective_report, refuse_suffix, write_objective_report

    if out is not None:
        refuse_suffix(out)
    loaded = load_recipe(recipe, ctx.args)
    if loaded.task != "denoiser":
        raise ConfigError(f"{recipe}: task is {loaded.task}; only a denoiser has an objective over noise levels")
    built = build_objective(loaded.objective)
    profiles = {name: profile_objective(built, shape) for name, shape in _shapes(loaded).items()}
    title = f"Objective of {loaded.name}: {loaded.objective.kind}"
    print(format_objective_report(title, profiles))
    if out is not None:
        write_objective_report(title, profiles, out)
        print(f"\n{out}")


def _shapes(recipe: Recipe) -> dict[str, tuple[int, int, int]]:
    """Names and latent sizes of the buckets to show."""
    from frameloom.builders.data import build_policy
    from frameloom.models.registry import VAES

    if not isinstance(getattr(recipe.objective, "shift", None), str):  # only flow shifts
        return {"every size": (1, 1, 1)}
    vae = VAES[recipe.vae.name]
    found = {}
    for bucket in build_policy(recipe).buckets:
        shape = vae.latent_shape(bucket.frames, bucket.height, bucket.width)
        found[shape] = f"{bucket.width}x{bucket.height}, {bucket.frames} frame(s)"
    shapes = sorted(found, key=lambda shape: (shape[0] * shape[1] * shape[2], shape))
    places = sorted({round(place * (len(shapes) - 1) / (_MOST_SHAPES - 1)) for place in range(_MOST_SHAPES)})
    return {found[shapes[place]]: shapes[place] for place in places}


def import_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="a shell script or command line, a Python configuration, a yaml")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="the recipe to write; default: print it", show_default=False)
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="sdxl, latte, opensora_plan, cogvideox_fun or opensora2; default: detected")
    ] = None,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="keep what is not understood as comments instead of stopping")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace OUT")] = False,
) -> None:
    """Print the recipe that equals the training command or configuration in FILE; nothing of FILE is ever run.

    Comments list what was changed, what the original ignores and what has no counterpart. Reads commands of
    CogVideoX-Fun, Open-Sora-Plan 1.1 and 1.3 and the SDXL trainer of MindONE, Open-Sora's configurations and SDXL's
    yaml; docs/arguments.md lists all arguments.

    Example: frameloom import train.sh -o my.yaml
    """
    from frameloom.core.errors import ConfigError
    from frameloom.core.files import write_text
    from frameloom.interop.importers.importer import import_command as import_file

    if out is not None and out.exists() and not force:
        raise ConfigError(f"{out}: exists already; choose another name, or replace it with --force")
    text = import_file(file, system=system, is_lenient=lenient)
    if out is None:
        print(text, end="")
        return
    write_text(out, text)
    print(f"{out}: look at its comments, then: frameloom recipe check {out}")


def arguments() -> None:
    """Print which key each argument of other trainers becomes, as Markdown; this is docs/arguments.md.

    Example: frameloom recipe arguments > docs/arguments.md
    """
    from frameloom.interop.importers.arguments import render_arguments

    print(render_arguments(), end="")
