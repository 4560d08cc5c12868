"""Show which noise levels a recipe trains on, and how much each counts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from frameloom.config.schema import Recipe

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
    from frameloom.config.load import load_recipe
    from frameloom.core.errors import ConfigError
    from frameloom.diffusion.profile import profile_objective
    from frameloom.evaluate.objective_report import format_report, refuse_suffix, write_objective_report
    from frameloom.generate.parts import build_objective

    if out is not None:
        refuse_suffix(out)
    loaded = load_recipe(recipe, ctx.args)
    if loaded.task != "denoiser":
        raise ConfigError(f"{recipe}: task is {loaded.task}; only a denoiser has an objective over noise levels")
    built = build_objective(loaded.objective)
    profiles = {name: profile_objective(built, shape) for name, shape in _shapes(loaded).items()}
    title = f"Objective of {loaded.name}: {loaded.objective.kind}"
    print(format_report(title, profiles))
    if out is not None:
        write_objective_report(title, profiles, out)
        print(f"\n{out}")


def _shapes(recipe: Recipe) -> dict[str, tuple[int, int, int]]:
    """Names and latent sizes of the buckets to show."""
    from frameloom.models.registry import VAES
    from frameloom.train.data_parts import build_policy

    if not isinstance(recipe.objective.shift, str):
        return {"every size": (1, 1, 1)}
    vae = VAES[recipe.vae.name]
    found = {}
    for bucket in build_policy(recipe).buckets:
        frames = max(1, (bucket.frames - vae.causal) // vae.strides[0] + vae.causal)
        shape = (frames, bucket.height // vae.strides[1], bucket.width // vae.strides[2])
        found[shape] = f"{bucket.width}x{bucket.height}, {bucket.frames} frame(s)"
    shapes = sorted(found, key=lambda shape: (shape[0] * shape[1] * shape[2], shape))
    places = sorted({round(place * (len(shapes) - 1) / (_MOST_SHAPES - 1)) for place in range(_MOST_SHAPES)})
    return {found[shapes[place]]: shapes[place] for place in places}
