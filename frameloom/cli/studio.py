"""The command `studio`: a local web page for data, runs, recipes and generation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def studio(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="runs, manifests and recipes below it are shown")
    ] = Path("."),
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="port; default: 7860, or a free one when that is taken")
    ] = None,
    host: Annotated[
        str, typer.Option(help="address to listen on; one that others can reach needs the token that is printed")
    ] = "127.0.0.1",
) -> None:
    """Open a page on DIR: Data, Runs, Recipe and Generate. Nothing outside DIR is shown; nothing is sent elsewhere.

    Example: frameloom studio ~/video --port 8000
    """
    from frameloom.studio.server.server import serve

    serve(folder, host=host, port=port)
