"""Find rows that should not be trained on and write a manifest without them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.outputs import check_output_file


class Duplicates(StrEnum):
    off = "off"
    exact = "exact"
    near = "near"


def check(
    manifest: Annotated[str, typer.Argument(help="a manifest, or any list of files that frameloom reads")],
    out: Annotated[Path, typer.Option(help="the clean manifest to write (.parquet)")],
    root: Annotated[Path | None, typer.Option(help="paths are relative to this folder")] = None,
    where: Annotated[str | None, typer.Option(help="check only rows like 'score > 2 and height >= 480'")] = None,
    min_frames: Annotated[int, typer.Option(min=1, help="shorter videos are left out")] = 1,
    min_side: Annotated[int, typer.Option(min=1, help="pictures with a shorter side are left out")] = 1,
    without_captions: Annotated[
        bool, typer.Option("--without-captions", help="do not ask for captions; an autoencoder needs none")
    ] = False,
    duplicates: Annotated[
        Duplicates, typer.Option(help="off, exact (same bytes), or near (looks alike; decodes three frames a file)")
    ] = Duplicates.near,
    workers: Annotated[int, typer.Option(min=1, help="processes")] = 4,
    timeout: Annotated[float, typer.Option(min=1, help="seconds that one file may take")] = 120.0,
) -> None:
    """Look at every file of MANIFEST; write the clean rows to OUT and the others, with reasons, to .reasons.parquet.

    Missing, unreadable, too short or too small files, wrong extensions, empty captions, rows that repeat a path and
    files that repeat another one are left out. No file is deleted. An interrupted call goes on where it stopped.

    Example: frameloom data check clips/manifest.parquet --out clips/clean.parquet --min-frames 17 --min-side 256
    """
    from frameloom.data.check import CheckOptions, check_files, describe_check
    from frameloom.data.filters import filter_table
    from frameloom.data.sources import read_source
    from frameloom.data.table_check import refuse_captions

    check_output_file(out, suffix=".parquet", source=Path(manifest))
    listed = read_source(Path(manifest), root=root)
    refuse_captions(listed.table.schema, source=manifest)
    table = filter_table(listed.table, where, source=manifest) if where else listed.table
    options = CheckOptions(
        min_frames=min_frames,
        min_side=min_side,
        needs_captions=not without_captions,
        duplicates=duplicates.value,
        workers=workers,
        timeout_s=timeout,
    )
    for line in describe_check(check_files(table, listed.root, out, options)):
        print(line)
