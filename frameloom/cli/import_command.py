"""Bring a training command or configuration of another system: it becomes a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="a shell script or command line, a Python configuration, a yaml")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="the recipe to write; default: print it", show_default=False)
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="sdxl, latte, opensora_plan, cogvideox_fun or opensora2; default: as it looks")
    ] = None,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="keep what is not understood as comments instead of stopping")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace OUT")] = False,
) -> None:
    """Print the recipe that equals the training command or configuration in FILE; nothing of FILE is ever run.

    Comments tell what was changed, what the original ignores and what has no counterpart. Reads commands of
    CogVideoX-Fun, Open-Sora-Plan 1.1 and 1.3 and the SDXL trainer of MindONE, Open-Sora's configurations and SDXL's
    yaml; docs/arguments.md lists all arguments.

    Example: frameloom import-command train.sh -o my.yaml
    """
    from frameloom.config.imports.importing import import_command as import_file
    from frameloom.core.errors import ConfigError
    from frameloom.core.files import write_text

    if out is not None and out.exists() and not force:
        raise ConfigError(f"{out}: exists already; choose another name, or replace it with --force")
    text = import_file(file, system=system, is_lenient=lenient)
    if out is None:
        print(text, end="")
        return
    write_text(out, text)
    print(f"{out}: look at its comments, then: frameloom recipe check {out}")


def arguments() -> None:
    """Print where each argument of other trainers lives here, as Markdown; this is docs/arguments.md."""
    from frameloom.config.arguments.page import render_arguments

    print(render_arguments(), end="")
