"""Encode the clips and captions of a recipe once, so that training reads latents instead of videos."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.outputs import check_output_folder


def cache(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="a denoiser recipe whose data.cache names the folders to write")],
    latents: Annotated[bool, typer.Option("--latents", help="only the latents (with --text: both)")] = False,
    text: Annotated[bool, typer.Option("--text", help="only the text embeddings (with --latents: both)")] = False,
    verify: Annotated[
        bool, typer.Option(help="read what is there and encode damaged groups again; else compare sizes only")
    ] = True,
    prune: Annotated[bool, typer.Option("--prune", help="then drop what RECIPE does not need")] = False,
) -> None:
    """Write the latent and text caches that RECIPE names in data.cache; what is there already is kept.

    Killed, it loses at most one group, and the same command goes on. Several processes share the work:
    torchrun --nproc-per-node 8 -m frameloom data cache my.yaml

    Example: frameloom data cache my.yaml --latents
    """
    from frameloom.config.checks import check_files
    from frameloom.config.load import load_with_places

    resolved, places = load_with_places(recipe, context.args)
    check_files(resolved, skip_caches=True, places=places)
    for name in ("latents", "text"):
        if folder := getattr(resolved.data.cache, name):
            check_output_folder(Path(folder), f"data.cache.{name}")
    from frameloom.train.caching import CacheJob, write_caches

    rank, num_ranks, local_rank = (int(os.environ.get(name, default)) for name, default in _RANKS)
    job = CacheJob(latents, text, rank, num_ranks, local_rank, verify, prune)
    for line in write_caches(resolved, job):
        print(f"rank {rank} of {num_ranks}: {line}" if num_ranks > 1 else line)


# What torchrun tells each process.
_RANKS = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
