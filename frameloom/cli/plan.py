"""The command `plan`: memory and time that a recipe needs, before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from frameloom.core.device import without_collector
from frameloom.core.errors import ConfigError
from frameloom.core.paths import check_output_file


# Importing models and passes in shapes make many objects and no cycles.
@without_collector()
def plan(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe file, or the name of a shipped recipe")],
    devices: Annotated[int, typer.Option(help="number of devices", min=1)] = 1,
    device: Annotated[str, typer.Option(help="h100, h200, a100, 4090, 910b or cpu")] = "cpu",
    memory: Annotated[str | None, typer.Option(help="memory of a device, as 80GB; default: as built")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="measure the rates of this machine")] = False,
    data: Annotated[bool, typer.Option(help="read the manifest for steps and time of an epoch")] = True,
    write: Annotated[
        Path | None, typer.Option(help="a new file for the recipe with the changes that are proposed, on top of RECIPE")
    ] = None,
    every_shape: Annotated[
        bool, typer.Option("--all", help="a row for every aspect ratio, not only for the most expensive one")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Memory, arithmetic and time of every bucket of RECIPE; shapes only, no weights are made or read.

    A bucket that does not fit is named with the smallest change that helps. Rows with ~ follow from measured ones.

    Example: frameloom plan opensora2/stage1 --devices 8 --device h200 --no-data
    """
    from frameloom.config.loading.recipe import load_recipe
    from frameloom.config.loading.yaml_values import format_value
    from frameloom.core.files import write_text
    from frameloom.planner.devices import calibrate as measure_rates
    from frameloom.planner.devices import choose_device
    from frameloom.planner.estimate import measure_recipe, plan_run, refuse_missing_manifest
    from frameloom.planner.suggest import balance_tokens, format_balance, render_recipe, suggest_change
    from frameloom.planner.table import format_plan, plan_json

    if write is not None:
        # A file on top of RECIPE cannot stand in its own place, and what another file says would be lost.
        check_output_file(write, "--write")
        if write.exists():
            raise ConfigError(f"--write {write}: exists; name a new file, which will inherit from the recipe")
    loaded = load_recipe(recipe, ctx.args)
    chosen = choose_device(device, memory)
    if data:
        refuse_missing_manifest(loaded)
    if calibrate:
        chosen = measure_rates(chosen)
    measured = measure_recipe(loaded)
    found = plan_run(loaded, chosen, devices, with_data=data, measured=measured)
    change = suggest_change(loaded, found, devices, measured)
    balance = balance_tokens(loaded, found, devices, measured)
    settings = (change.settings if change else {}) | (balance.settings if balance else {})
    if as_json:
        print(json.dumps(plan_json(found) | {"change": settings or None}, indent=2))
    else:
        print("\n".join(format_plan(found, every_shape=every_shape)))
        if not found.breaking:
            print("every bucket fits")
        else:
            worst = f"{len(found.breaking)} bucket(s) do not fit, the worst is {found.breaking[0].bucket.name}"
            lines = [f"  {key}: {format_value(value)}" for key, value in change.settings.items()] if change else []
            print(f"{worst}; {'the smallest change that helps:' if lines else 'no sharding, recompute or batch helps'}")
            print("\n".join(lines), end="\n" if lines else "")
        if balance is not None:
            print(format_balance(balance))
    if write is not None and settings:
        write_text(write, render_recipe(recipe, ctx.args, settings))
        typer.echo(f"wrote {write}", err=True)  # stdout may be JSON
    elif write is not None:
        reason = "no change was found that helps" if found.breaking else "nothing to change"
        typer.echo(f"{reason}; {write} was not written", err=True)
