"""Account for every row of a run's manifest: used, waiting, skipped and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.outputs import check_output_file


def ledger(
    run: Annotated[Path, typer.Argument(help="a run folder, such as runs/my-run", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="write a parquet table with the fate of every row in every epoch")
    ] = None,
) -> None:
    """Say what became of every row in every epoch of RUN, and check that it adds up; exit code 1 if it does not.

    Example: frameloom data ledger runs/my-run --out ledger.parquet
    """
    from frameloom.train.ledger import account_run

    if out is not None:
        check_output_file(out, suffix=".parquet")
    found = account_run(run)
    for line in found.describe():
        print(line)
    if out is not None:
        from frameloom.data.ledger import write_ledger

        write_ledger(out, found.manifest, found.epochs)
        print(f"written: {out}")
    if found.problems:
        raise typer.Exit(1)
