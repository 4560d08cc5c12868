"""Write a page about a manifest: counts, histograms, buckets, thumbnails, captions, broken files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.outputs import check_output_file
from frameloom.core.errors import ConfigError


def report(
    context: typer.Context,
    manifest: Annotated[str, typer.Argument(help="a manifest, or any list of files that frameloom reads")],
    out: Annotated[Path, typer.Option(help="the page to write (.html)")] = Path("report.html"),
    root: Annotated[Path | None, typer.Option(help="paths are relative to this folder")] = None,
    recipe: Annotated[str | None, typer.Option(help="show the buckets that this recipe puts the clips in")] = None,
    thumbs: Annotated[int, typer.Option(min=0, max=500, help="how many files to show")] = 48,
    seed: Annotated[int, typer.Option(help="which files to show")] = 0,
) -> None:
    """Write one self-contained HTML page about MANIFEST, with the broken files listed beside it by scan and check.

    Example: frameloom data report clips/manifest.parquet --out report.html --recipe my.yaml
    """
    from frameloom.data.report import gather_facts
    from frameloom.data.sources import read_source
    from frameloom.evaluate.data_report import write_data_report

    check_output_file(out, source=Path(manifest))
    if recipe is None and context.args:
        raise ConfigError(f"{context.args[0]}: no flag of this command; a key of a recipe needs --recipe before it")
    listed = read_source(Path(manifest), root=root)
    facts = gather_facts(listed.table, listed.root, Path(manifest), num_thumbs=thumbs, seed=seed)
    buckets = unused = None
    if recipe is not None:
        from frameloom.config.load import load_recipe
        from frameloom.data.buckets import assign, bucket_table, count_unused
        from frameloom.data.manifest import Manifest
        from frameloom.train.data_parts import build_policy

        resolved = load_recipe(recipe, context.args)
        rows = Manifest.read(Path(manifest), root=listed.root, where=resolved.data.where)
        policy = build_policy(resolved)
        assignment = assign(rows, policy, resolved.seed, 0)
        buckets, unused = bucket_table(assignment, policy), count_unused(rows, policy, assignment)
    write_data_report(facts, out, buckets=buckets, unused=unused)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, open it in a browser")
