"""Write Moving Shapes, a small captioned set of clips and images to train and measure on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.outputs import check_output_folder


def shapes(
    out: Annotated[Path, typer.Argument(help="a new folder, or one that an interrupted call left", show_default=False)],
    count: Annotated[int, typer.Option(min=1, help="how many files")] = 2000,
    seed: Annotated[int, typer.Option(help="another seed gives another set; the same gives the same bytes")] = 0,
    image_share: Annotated[float, typer.Option(min=0, max=1, help="share of files that are single images")] = 0.2,
    heldout_share: Annotated[
        float, typer.Option(min=0, max=1, help="share of files that show combinations kept out of training")
    ] = 0.1,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; as many as cores by default, up to 4")] = None,
) -> None:
    """Write Moving Shapes: real mp4 and png files with captions, and their manifest.

    Example: frameloom data shapes data/shapes --count 2000 --seed 0
    """
    from frameloom.data.shapes_set import describe_shapes, write_shapes

    check_output_folder(out, "OUT")
    manifest = write_shapes(
        out, count=count, seed=seed, image_share=image_share, heldout_share=heldout_share, num_workers=workers
    )
    for line in describe_shapes(manifest):
        typer.echo(line)
