"""Compare folders of samples on the same prompts and seeds: a page with videos side by side and a table of metrics."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.vae_options import AsJson, Device
from frameloom.core.errors import ConfigError


def compare(
    folders: Annotated[list[Path], typer.Argument(help="two or more runs, or folders that `frameloom sample` wrote")],
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("comparison.html"),
    metrics: Annotated[
        str | None,
        typer.Option(help="with commas, of motion, flicker, consistency, clip, shapes; default: all that can be told"),
    ] = None,
    network: Annotated[Path | None, typer.Option(help="a vision network of transformers, for consistency")] = None,
    clip: Annotated[Path | None, typer.Option(help="a CLIP of transformers, for the likeness to the prompt")] = None,
    shown: Annotated[int, typer.Option(min=0, help="prompts whose videos are on the page; all are measured")] = 24,
    confidence: Annotated[float, typer.Option(help="of the intervals")] = 0.95,
    force: Annotated[bool, typer.Option("--force", help="replace an earlier page")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Write one page that needs nothing else: a table with intervals by bootstrap, and the videos of each prompt.

    Only prompts and seeds that all folders have are compared. Of a run, the files in its folder `samples` are taken.

    Example: frameloom compare runs/before runs/after --out comparison.html
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"--confidence {confidence:g}: choose a number between 0 and 1, such as 0.95")
    if out.suffix != ".html":
        raise ConfigError(f"--out {out}: the page ends in .html; choose such a name")
    if out.exists() and not force:
        raise ConfigError(f"--out {out}: exists; choose another name, or replace it with --force")
    from frameloom.data.shapes_score import PROMPT_METRICS
    from frameloom.evaluate.clip_measures import build_clip_measures
    from frameloom.evaluate.sample_sets import (
        Key,
        SampleSet,
        compare_samples,
        describe_sets,
        match_samples,
        write_comparison,
    )
    from frameloom.generate.outputs import read_frames
    from frameloom.generate.parts import pick_device
    from frameloom.generate.sample_folder import find_samples, name_folders

    found = [find_samples(folder) for folder in folders]
    sets = [
        SampleSet(name, {Key(sample.prompt, sample.seed, sample.number): sample.path for sample in samples})
        for name, samples in zip(name_folders(folders), found, strict=True)
    ]
    prompts = [key.prompt for key in match_samples(sets)]
    names = None if metrics is None else [name.strip() for name in metrics.split(",") if name.strip()]
    measures = build_clip_measures(
        names,
        network=network,
        clip=clip,
        device=pick_device(device),
        prompt_metrics=PROMPT_METRICS,
        prompts=prompts,
    )
    compared = compare_samples(sets, measures, read_frames, confidence=confidence)
    write_comparison(compared, out, read_frames, max_shown=shown)
    if as_json:
        summaries = {
            column: {samples.name: asdict(summary) for samples, summary in zip(sets, parts, strict=True)}
            for column, parts in compared.summaries().items()
        }
        print(json.dumps({"page": str(out), "prompts": len(compared.keys), "summary": summaries}, indent=2))
        return
    for line in [*describe_sets(compared), f"page: {out}"]:
        print(line)
