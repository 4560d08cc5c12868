"""The command `plan`: memory and time that a recipe needs, before a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

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
    memory: Annotated[
        str | None, typer.Option(help="memory of a device, as 80GB; default: what the device has")
    ] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="measure the rates of the machine at hand")] = False,
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
    from frameloom.planner.devices import calibrate as measure_rates
    from frameloom.planner.devices import choose_device
    from frameloom.planner.estimate import measure_recipe, plan_run, refuse_missing_manifest
    from frameloom.planner.suggest import balance_tokens, format_balance, suggest_change
    from frameloom.planner.table import format_plan, plan_json

    if write is not None:
        _refuse_existing(write)
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
        _print_advice(len(found.breaking), found.breaking[0].bucket.name if found.breaking else "", change)
        if balance is not None:
            print(format_balance(balance))
    if write is not None:
        _write_recipe(write, recipe, ctx.args, settings, fits=not found.breaking)


def _print_advice(num_breaking: int, worst: str, change: object) -> None:
    from frameloom.config.loading.yaml_values import format_value
    from frameloom.planner.suggest import Change

    if not num_breaking:
        print("every bucket fits")
    elif isinstance(change, Change):
        print(f"{num_breaking} bucket(s) do not fit, the worst is {worst}; the smallest change that helps:")
        print("\n".join(f"  {key}: {format_value(value)}" for key, value in change.settings.items()))
    else:
        print(f"{num_breaking} bucket(s) do not fit, the worst is {worst}; no sharding, recompute or batch helps")


def _refuse_existing(path: Path) -> None:
    """A file on top of RECIPE cannot stand in its own place, and what another file says would be lost."""
    check_output_file(path, "--write")
    if path.exists():
        raise ConfigError(f"--write {path}: exists; name a new file, which will inherit from the recipe")


def _write_recipe(path: Path, base: str, overrides: Sequence[str], settings: Mapping[str, Any], *, fits: bool) -> None:
    """Says what it did on stderr: stdout may be JSON."""
    from frameloom.core.files import write_text
    from frameloom.planner.suggest import render_recipe

    if not settings:
        reason = "nothing to change" if fits else "no change was found that helps"
        typer.echo(f"{reason}; {path} was not written", err=True)
        return
    write_text(path, render_recipe(base, overrides, settings))
    typer.echo(f"wrote {path}", err=True)
