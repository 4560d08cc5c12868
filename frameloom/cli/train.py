"""Commands that start runs: train, launch on several processes or hosts, replay the run behind an export."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from frameloom.core.errors import ConfigError

AcceptRecipe = Annotated[
    bool,
    typer.Option("--accept-recipe-change", help="resume with a recipe that changes what is learned"),
]
AcceptData = Annotated[
    bool, typer.Option("--accept-data-change", help="resume with another manifest than the checkpoint's")
]
DataPosition = Annotated[
    int | None,
    typer.Option("--data-position", min=0, help="resume at this sample of the checkpoint's epoch; 0: its start"),
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

    An existing run resumes from its newest checkpoint.

    Example: frameloom train shapes/demo --optim.lr 1e-4 --train.steps 2000

    Example: frameloom train my.yaml --data-position 0
    """
    from frameloom.api import train as run_training
    from frameloom.distributed.ranks import read_ranks

    run = run_training(
        recipe,
        context.args,
        accept_recipe_change=accept_recipe_change,
        accept_data_change=accept_data_change,
        data_position=data_position,
    )
    if not read_ranks().is_first:
        return
    print(f"done: {run.folder}")
    if run.recipe.task == "denoiser":
        print(f'sample it: frameloom sample {run.folder} --prompt "…"')


_LEAST_HOURS = 0.1


def launch(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="a recipe file, or the name of a shipped one")],
    nproc: Annotated[int, typer.Option(help="processes on each host, one for each GPU", min=1)] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="one host per line, e.g. `node1 slots=8`")] = None,
    slurm: Annotated[int | None, typer.Option(help="write a Slurm script for this many nodes", min=1)] = None,
    hours: Annotated[float, typer.Option(help="how long a Slurm job may run")] = 24.0,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="a further option of the Slurm script, e.g. --sbatch=--partition=gpu")
    ] = None,
    port: Annotated[
        int, typer.Option(help="port of the first host, where the others connect", min=1024, max=65535)
    ] = 29500,
    restarts: Annotated[int, typer.Option(help="restarts after a crash", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="write the Slurm script here")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the commands and start nothing")] = False,
    accept_recipe_change: AcceptRecipe = False,
    accept_data_change: AcceptData = False,
    data_position: DataPosition = None,
) -> None:
    """Start what RECIPE describes with torchrun; any key can follow with dots.

    Example: frameloom launch my.yaml --nproc 8 --parallel.zero 2
    """
    from frameloom.config.loading.recipe import load_with_locations
    from frameloom.config.rules.check import check_files
    from frameloom.config.rules.parallel import check_world
    from frameloom.training.launch import Job, Slurm, host_commands, read_hostfile, single_command, slurm_script

    if hostfile is not None and slurm is not None:
        raise ConfigError("--hostfile and --slurm: only one of them can choose the machines; remove one")
    if slurm is None and (out is not None or sbatch):
        raise ConfigError(f"{'--out' if out else '--sbatch'}: belongs to the script of a Slurm job; add --slurm NODES")
    if not (math.isfinite(hours) and hours > _LEAST_HOURS):
        raise ConfigError(f"--hours {hours:g}: a job saves two minutes before its end; give it more time")
    resolved, locations = load_with_locations(recipe, context.args)
    check_files(resolved, locations=locations)
    if data_position is not None and restarts:
        raise ConfigError("--data-position and --restarts: every restart would repeat data; remove one")
    choices = ["--accept-recipe-change"] * accept_recipe_change + ["--accept-data-change"] * accept_data_change
    choices += [] if data_position is None else ["--data-position", str(data_position)]
    job = Job(recipe, [*context.args, *choices], nproc, port, restarts)
    if slurm is not None:
        check_world(resolved, nproc * slurm)
        gpus = resolved.train.device != "cpu"
        script = slurm_script(job, Slurm(slurm, hours, gpus, sbatch or ()), name=resolved.name)
        _submit(script, out, dry_run)
        return
    if hostfile is None:
        check_world(resolved, nproc)
        _start(single_command(job), dry_run)
        return
    hosts = read_hostfile(hostfile)
    check_world(resolved, sum(host.slots or nproc for host in hosts))
    _start_hosts(host_commands(job, hosts), dry_run)


def _start(command: list[str], dry_run: bool) -> None:
    """Replace this process, so that its signals reach the training processes."""
    if dry_run:
        print(shlex.join(command))
        return
    sys.stdout.flush()
    os.execv(command[0], command)


def _start_hosts(commands: list[tuple[str, str]], dry_run: bool) -> None:
    from frameloom.training.launch import ssh_command

    if dry_run:
        for host, line in commands:
            print(f"{host}: {line}")
        return
    started = [subprocess.Popen(ssh_command(host, line)) for host, line in commands]
    codes = [process.wait() for process in started]
    raise typer.Exit(max(code if code >= 0 else 128 - code for code in codes))


def _submit(script: str, out: Path | None, dry_run: bool) -> None:
    if dry_run and out is None:
        print(script, end="")
        return
    from frameloom.core.files import write_text

    path = out or Path("frameloom.sbatch")
    write_text(path, script)
    if dry_run:
        print(f"written: {path}; submit it with: sbatch {shlex.quote(str(path))}")
        return
    raise typer.Exit(subprocess.run(["sbatch", str(path)], check=False).returncode)


def replay(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="an export, a .safetensors file of one, or a run folder")],
    out: Annotated[Path | None, typer.Option(help="write the recipe here; default: NAME.yaml")] = None,
    name: Annotated[str | None, typer.Option(help="name of the new run; default: the old one with -replay")] = None,
    start: Annotated[bool, typer.Option("--start", help="train at once instead of printing the command")] = False,
) -> None:
    """Write the recipe of the run that made FOLDER, list what has changed since, and print the command to start it.

    Example: frameloom replay my-model

    Example: frameloom replay runs/my-run/exports/diffusers --name again --start
    """
    from frameloom.training.run.reproduce import find_differences, read_recorded_run, write_recipe

    found = read_recorded_run(folder, context.args, name=name)
    file = out or Path(f"{found.recipe.name}.yaml")
    write_recipe(found, file)
    print(f"recipe: {file}")
    for change in find_differences(found):
        print(f"changed: {change}")
    if not start:
        print(f"start it: frameloom train {file}")
        return
    from frameloom.api import train

    print(f"done: {train(found.recipe).folder}")
