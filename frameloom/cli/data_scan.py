"""Fill in sizes, lengths and frame rates of a list of files from their headers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.outputs import check_output_file


def scan(
    source: Annotated[str, typer.Argument(help="a folder, a manifest, or any list of files that frameloom reads")],
    out: Annotated[Path, typer.Option(help="the manifest to write (.parquet); progress is kept beside it")],
    root: Annotated[Path | None, typer.Option(help="paths are relative to this folder")] = None,
    where: Annotated[str | None, typer.Option(help="keep only rows like 'score > 2 and split == \"train\"'")] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes")] = 4,
    timeout: Annotated[float, typer.Option(min=1, help="seconds that one file may take")] = 60.0,
    audit: Annotated[float, typer.Option(min=0, max=1, help="share of the good files to decode as a test")] = 0.0,
    shard: Annotated[str | None, typer.Option(help="scan only part i of n, written i/n with i from 0")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="scan nothing, join what the shards found")] = False,
) -> None:
    """Read the headers of all files of SOURCE and write a manifest; broken files go to OUT's .errors.parquet.

    Nothing is decoded but what --audit asks for. A call that was interrupted goes on where it stopped, and only files
    that changed are looked at again.

    Example: frameloom data scan clips/ --out clips/manifest.parquet --workers 8 --audit 0.01
    """
    from frameloom.core.errors import ConfigError
    from frameloom.data.filters import filter_table
    from frameloom.data.scan import ScanOptions, Shard, describe_scan, finish_scan, scan_files
    from frameloom.data.sources import read_source
    from frameloom.data.table_check import refuse_captions

    if merge and shard:
        raise ConfigError("--merge joins all shards; leave --shard out")
    part = Shard.parse(shard) if shard else None
    check_output_file(out, suffix=".parquet", source=Path(source))
    listed = read_source(Path(source), root=root)
    refuse_captions(listed.table.schema, source=source)
    table = filter_table(listed.table, where, source=source) if where else listed.table
    if not merge:
        options = ScanOptions(workers=workers, timeout_s=timeout, audit=audit)
        found = scan_files(table, listed.root, out, options, shard=part)
        if part is not None:
            num_bad = found["reason"].is_not_null().sum()
            print(f"shard {shard}: {found.height:,} files, {num_bad:,} of them broken")
            print(f"when all shards are done: frameloom data scan {source} --out {out} --merge")
            return
    for line in describe_scan(finish_scan(table, listed.root, out)):
        print(line)
