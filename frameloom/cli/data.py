"""Commands about data: scan, check, verify, report, shard, ledger and cache."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.vae import Root
from frameloom.core.errors import ConfigError
from frameloom.core.paths import check_output_file, check_output_folder
from frameloom.core.units import format_bytes


def scan(
    source: Annotated[str, typer.Argument(help="a folder, a manifest, or any list of files that frameloom reads")],
    out: Annotated[Path, typer.Option(help="the manifest to write (.parquet); progress is kept beside it")],
    root: Root = None,
    where: Annotated[str | None, typer.Option(help="keep only rows like 'score > 2 and split == \"train\"'")] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes")] = 4,
    timeout: Annotated[float, typer.Option(min=1, help="seconds that one file may take")] = 60.0,
    audit: Annotated[float, typer.Option(min=0, max=1, help="share of the good files to decode as a test")] = 0.0,
    shard: Annotated[str | None, typer.Option(help="scan only part i of n, written i/n with i from 0")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="scan nothing, join what the shards found")] = False,
) -> None:
    """Read the headers of all files of SOURCE and write a manifest; broken files go to OUT's .errors.parquet.

    Only the share of --audit is decoded. An interrupted call resumes where it stopped, and only changed
    files are read again.

    Example: frameloom data scan clips/ --out clips/manifest.parquet --workers 8 --audit 0.01
    """
    from frameloom.data.curation.scan import ScanOptions, describe_scan, finish_scan, parse_shard, scan_files
    from frameloom.data.manifest.filters import filter_table
    from frameloom.data.manifest.rows import refuse_captions
    from frameloom.data.manifest.sources.reading import read_source

    if merge and shard:
        raise ConfigError("--merge joins all shards; leave --shard out")
    part = parse_shard(shard) if shard else None
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


class Duplicates(StrEnum):
    off = "off"
    exact = "exact"
    near = "near"


def check(
    manifest: Annotated[str, typer.Argument(help="a manifest, or any list of files that frameloom reads")],
    out: Annotated[Path, typer.Option(help="the clean manifest to write (.parquet)")],
    root: Root = None,
    where: Annotated[str | None, typer.Option(help="check only rows like 'score > 2 and height >= 480'")] = None,
    min_frames: Annotated[int, typer.Option(min=1, help="shorter videos are left out")] = 1,
    min_side: Annotated[int, typer.Option(min=1, help="pictures with a shorter side are left out")] = 1,
    without_captions: Annotated[
        bool, typer.Option("--without-captions", help="do not require captions; an autoencoder needs none")
    ] = False,
    duplicates: Annotated[
        Duplicates, typer.Option(help="off, exact (same bytes), or near (looks alike; decodes three frames a file)")
    ] = Duplicates.near,
    workers: Annotated[int, typer.Option(min=1, help="processes")] = 4,
    timeout: Annotated[float, typer.Option(min=1, help="seconds that one file may take")] = 120.0,
) -> None:
    """Check every file of MANIFEST; write the clean rows to OUT and the others, with reasons, to .reasons.parquet.

    Missing, unreadable, too short or too small files, wrong extensions, empty captions, rows that repeat a path and
    files that repeat another one are left out. No file is deleted. An interrupted call resumes where it stopped.

    Example: frameloom data check clips/manifest.parquet --out clips/clean.parquet --min-frames 17 --min-side 256
    """
    from frameloom.data.curation.check import CheckOptions, check_files, describe_check
    from frameloom.data.manifest.filters import filter_table
    from frameloom.data.manifest.rows import refuse_captions
    from frameloom.data.manifest.sources.reading import read_source

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


def verify(
    manifest: Annotated[str, typer.Argument(help="a manifest, or any list of files that frameloom reads")],
    root: Root = None,
    out: Annotated[
        Path | None, typer.Option(help="compare nothing; write the manifest with the digests of the files as they are")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="threads")] = 4,
) -> None:
    """Read every file of MANIFEST and compare its SHA-256 with the column sha256; ends with 2 when one has changed.

    A flipped bit in a video mostly decodes to other pixels without an error, so only a digest shows it.

    Example: frameloom data verify clips/manifest.parquet
    """
    from frameloom.data.curation.verify import record_digests, verify_files
    from frameloom.data.manifest.manifest import write_manifest
    from frameloom.data.manifest.sources.reading import read_source

    if out is not None:
        check_output_file(out, suffix=".parquet", source=Path(manifest))
    listed = read_source(Path(manifest), root=root)
    if out is not None:
        table = record_digests(listed.table, listed.root, name=manifest, workers=workers)
        write_manifest(out, table)
        print(f"{out}: {table.height:,} rows with the digests of their files")
        return
    num_files = verify_files(listed.table, listed.root, name=manifest, workers=workers)
    print(f"{manifest}: {num_files:,} files are what they were")


def report(
    context: typer.Context,
    manifest: Annotated[str, typer.Argument(help="a manifest, or any list of files that frameloom reads")],
    out: Annotated[Path, typer.Option(help="the page to write (.html)")] = Path("report.html"),
    root: Root = None,
    recipe: Annotated[str | None, typer.Option(help="show the buckets that this recipe puts the clips in")] = None,
    thumbs: Annotated[int, typer.Option(min=0, max=500, help="how many files to show")] = 48,
    seed: Annotated[int, typer.Option(help="which files to show")] = 0,
) -> None:
    """Write one self-contained HTML page about MANIFEST, with the broken files listed beside it by scan and check.

    Example: frameloom data report clips/manifest.parquet --out report.html --recipe my.yaml
    """
    from frameloom.data.curation.report import gather_facts
    from frameloom.data.manifest.sources.reading import read_source
    from frameloom.evaluate.reports import write_data_report

    check_output_file(out, source=Path(manifest))
    if recipe is None and context.args:
        raise ConfigError(f"{context.args[0]}: no flag of this command; a key of a recipe needs --recipe before it")
    listed = read_source(Path(manifest), root=root)
    facts = gather_facts(listed.table, listed.root, Path(manifest), num_thumbs=thumbs, seed=seed)
    buckets = unused = None
    if recipe is not None:
        from frameloom.builders.data import build_policy
        from frameloom.config.loading.recipe import load_recipe
        from frameloom.data.buckets.policy import assign, bucket_table, count_unused
        from frameloom.data.manifest.manifest import Manifest

        resolved = load_recipe(recipe, context.args)
        rows = Manifest.read(Path(manifest), root=listed.root, where=resolved.data.where)
        policy = build_policy(resolved)
        assignment = assign(rows, policy, resolved.seed, 0)
        buckets, unused = bucket_table(assignment, policy), count_unused(rows, policy, assignment)
    write_data_report(facts, out, buckets=buckets, unused=unused)
    print(f"{out}: {format_bytes(out.stat().st_size)}, open it in a browser")


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
    from frameloom.data.manifest.manifest import shard_manifest

    check_output_folder(out, "OUT")
    for line in shard_manifest(manifest, out, rows=rows, root=root, where=where):
        typer.echo(line)


def ledger(
    run: Annotated[Path, typer.Argument(help="a run folder, such as runs/my-run", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="write a parquet table with the status of every row in every epoch")
    ] = None,
) -> None:
    """Report how every row of every epoch of RUN was used, and check the totals; exit code 1 if they do not add up.

    Example: frameloom data ledger runs/my-run --out ledger.parquet
    """
    from frameloom.training.run.usage import account_run

    if out is not None:
        check_output_file(out, suffix=".parquet")
    found = account_run(run)
    for line in found.describe():
        print(line)
    if out is not None:
        from frameloom.data.order.usage import write_usage

        write_usage(out, found.manifest, found.epochs)
        print(f"written: {out}")
    if found.problems:
        raise typer.Exit(1)


def cache(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="a denoiser recipe whose data.cache names the folders to write")],
    latents: Annotated[bool, typer.Option("--latents", help="only the latents (with --text: both)")] = False,
    text: Annotated[bool, typer.Option("--text", help="only the text embeddings (with --latents: both)")] = False,
    verify: Annotated[
        bool, typer.Option(help="read existing groups and encode damaged ones again; else compare sizes only")
    ] = True,
    prune: Annotated[bool, typer.Option("--prune", help="then drop what RECIPE does not need")] = False,
) -> None:
    """Write the latent and text caches that RECIPE names in data.cache; existing groups are kept.

    If it is killed, at most one group is lost; the same command resumes. Several processes share the work:
    torchrun --nproc-per-node 8 -m frameloom data cache my.yaml

    Example: frameloom data cache my.yaml --latents
    """
    from frameloom.config.loading.recipe import load_with_locations
    from frameloom.config.rules.check import check_files

    resolved, locations = load_with_locations(recipe, context.args)
    check_files(resolved, skip_caches=True, locations=locations)
    for name in ("latents", "text"):
        if folder := getattr(resolved.data.cache, name):
            check_output_folder(Path(folder), f"data.cache.{name}")
    from frameloom.data.cache.filling import CacheJob
    from frameloom.distributed.ranks import read_ranks
    from frameloom.training.caching import write_caches

    ranks = read_ranks()
    job = CacheJob(latents, text, ranks.rank, ranks.num_ranks, ranks.local_rank, verify, prune)
    for line in write_caches(resolved, job):
        print(f"rank {ranks.rank} of {ranks.num_ranks}: {line}" if ranks.num_ranks > 1 else line)
