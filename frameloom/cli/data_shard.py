"""Cut a table of clips into parquet shards, so that captions and paths stay on disk while training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.outputs import check_output_folder


def shard(
    manifest: Annotated[Path, typer.Argument(help="a manifest, or any complete table, list or folder")],
    out: Annotated[Path, typer.Argument(help="a new folder, best beside the manifest", show_default=False)],
    rows: Annotated[int, typer.Option(min=1, help="rows of a shard")] = 10_000,
    root: Annotated[Path | None, typer.Option(help="folder that the paths start from; default: as the source")] = None,
    where: Annotated[str, typer.Option(help="keep only the rows that fulfil this filter")] = "",
) -> None:
    """Cut MANIFEST into OUT/00001.parquet and so on; name OUT as data.manifest of a recipe.

    Example: frameloom data shard clips/manifest.parquet clips/shards --rows 10000
    """
    from frameloom.data.manifest import shard_manifest

    check_output_folder(out, "OUT")
    for line in shard_manifest(manifest, out, rows=rows, root=root, where=where):
        typer.echo(line)
