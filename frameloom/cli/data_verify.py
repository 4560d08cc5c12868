"""Compare the files of a manifest with the digests it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.outputs import check_output_file


def verify(
    manifest: Annotated[str, typer.Argument(help="a manifest, or any list of files that frameloom reads")],
    root: Annotated[Path | None, typer.Option(help="paths are relative to this folder")] = None,
    out: Annotated[
        Path | None, typer.Option(help="compare nothing; write the manifest with the digests of the files as they are")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="threads")] = 4,
) -> None:
    """Read every file of MANIFEST and compare its SHA-256 with the column sha256; ends with 2 when one has changed.

    A flipped bit in a video mostly decodes to other pixels without an error, so nothing else would tell.

    Example: frameloom data verify clips/manifest.parquet
    """
    from frameloom.data.manifest import write_manifest
    from frameloom.data.sources import read_source
    from frameloom.data.verify import record_digests, refuse_problems, verify_files

    if out is not None:
        check_output_file(out, suffix=".parquet", source=Path(manifest))
    listed = read_source(Path(manifest), root=root)
    if out is not None:
        table = record_digests(listed.table, listed.root, name=manifest, workers=workers)
        write_manifest(out, table)
        print(f"{out}: {table.height:,} rows with the digests of their files")
        return
    found = verify_files(listed.table, listed.root, name=manifest, workers=workers)
    refuse_problems(found, manifest)
    print(f"{manifest}: {found.num_right:,} files are what they were")
