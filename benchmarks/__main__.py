"""Run measured comparisons and print one table of their numbers: `python -m benchmarks [TOPIC]...`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import Row
from benchmarks.report import format_header, format_row, make_record, read_page, read_record, write_page
from benchmarks.topics import TOPICS, choose_settings, measure_apart
from frameloom.core.errors import ConfigError, FrameloomError
from frameloom.core.files import write_text
from frameloom.core.logging import set_up_logging
from frameloom.core.paths import check_output_file, check_output_folder


def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[TOPIC]...", help="which; default: all")] = None,
    rounds: Annotated[int | None, typer.Option(help="how often each side is measured", min=1)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="small inputs: whether it runs, not how fast")] = False,
    files: Annotated[
        list[Path] | None, typer.Option("--file", help="measure decode or scan on this clip; repeatable")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="also write the rows with date and machine to this file")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="put the table and its curves into this page, between its marks")
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--from", help="measure nothing: take the rows of a file that --json wrote")
    ] = None,
) -> None:
    """Measure ours beside what others do, in turns within one run; only ratios carry over to other machines.

    Ends with 1 if a comparison failed; one whose other side is not installed is left out with the package's name.

    \b
    Example:
      python -m benchmarks
      python -m benchmarks step decode --rounds 9
      python -m benchmarks --json bench.json --page docs/performance.md
    """
    # Before minutes of measuring: the page has its marks, and all can be written.
    if json_file is not None:
        check_output_file(json_file, "--json")
    if page is not None:
        read_page(page)
        check_output_file(page, "--page")
        check_output_folder(page.parent / "images", "--page")
    if record is not None:
        values = {"TOPIC": names, "--rounds": rounds, "--quick": quick, "--file": files}
        if given := ", ".join(key for key, value in values.items() if value):
            raise ConfigError(f"--from measures nothing, so {given} would do nothing; leave out one or the other")
        found, rows = read_record(record)
        print("\n".join([format_header(), *(format_row(row) for row in rows)]))
    else:
        rows = _measure(names or [], rounds, quick, files or [])
        found = make_record(rows, is_quick=quick)
    if json_file is not None:
        write_text(json_file, json.dumps(found, indent=1) + "\n")
    if page is not None:
        write_page(page, found)
    failed = [row for row in found["rows"] if row.get("problem")]
    if failed:
        typer.echo(f"{len(failed)} comparison(s) failed: {', '.join(row['name'] for row in failed)}", err=True)
        raise typer.Exit(1)


def _measure(names: Sequence[str], rounds: int | None, quick: bool, files: Sequence[Path]) -> list[Row]:
    unknown = [name for name in names if name not in TOPICS]
    if unknown:
        raise ConfigError(f"there is no benchmark '{unknown[0]}'; choose from: {', '.join(TOPICS)}")
    takers = [name for name, topic in TOPICS.items() if topic.takes_files]
    if files and (not names or any(name not in takers for name in names)):
        raise ConfigError(f"--file: only {' and '.join(takers)} measure given files; name one of them")
    print(format_header(), flush=True)
    rows = []
    for name in names or TOPICS:
        options = choose_settings(name, rounds=rounds, is_quick=quick, is_alone=bool(names))
        for row in measure_apart(name, options, files):
            print(format_row(row), flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """0 when everything was measured, 1 when a comparison failed, 2 for wrong input."""
    set_up_logging()
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help=bench.__doc__)(bench)
    try:
        app(prog_name="python -m benchmarks")
    except FrameloomError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
