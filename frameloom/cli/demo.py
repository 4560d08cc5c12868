"""Commands of the demo: run it, write the Moving Shapes dataset, score a model on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from frameloom.core.paths import check_output_folder


def demo(
    context: typer.Context,
    folder: Annotated[
        Path | None, typer.Option(help="where everything is written; runs/demo or runs/demo-long if not given")
    ] = None,
    long: Annotated[
        bool,
        typer.Option("--long", help="train for an hour instead of ten minutes: follows nearly every prompt"),
    ] = False,
) -> None:
    """Train a text-to-video model from nothing in minutes; rerun the command to resume.

    Example: frameloom demo
    """
    from frameloom.demo.demo import LONG, SHORT, run_demo

    plan = LONG if long else SHORT
    run_demo(replace(plan, folder=folder or plan.folder, overrides=tuple(context.args)), print)


def shapes(
    out: Annotated[Path, typer.Argument(help="a new folder, or one that an interrupted call left", show_default=False)],
    count: Annotated[int, typer.Option(min=1, help="how many files")] = 2000,
    seed: Annotated[int, typer.Option(help="another seed gives another set; the same gives the same bytes")] = 0,
    image_share: Annotated[float, typer.Option(min=0, max=1, help="share of files that are single images")] = 0.2,
    heldout_share: Annotated[
        float, typer.Option(min=0, max=1, help="share of files that show combinations kept out of training")
    ] = 0.1,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; as many as cores by default, up to 4")] = None,
) -> None:
    """Write Moving Shapes: real mp4 and png files with captions, and their manifest.

    Example: frameloom data shapes data/shapes --count 2000 --seed 0
    """
    from frameloom.demo.shapes_set import format_shapes, write_shapes

    check_output_folder(out, "OUT")
    manifest = write_shapes(
        out, count=count, seed=seed, image_share=image_share, heldout_share=heldout_share, num_workers=workers
    )
    for line in format_shapes(manifest):
        typer.echo(line)


def score(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="a denoiser run that was trained on Moving Shapes")],
    count: Annotated[int, typer.Option(help="number of prompts", min=1)] = 108,
    seed: Annotated[int, typer.Option(help="which prompts")] = 1,
    step: Annotated[int | None, typer.Option(help="score this checkpoint; default: the newest")] = None,
    from_first_frame: Annotated[
        bool,
        typer.Option(
            "--from-first-frame", help="image to video: give a first frame as well, which does not reveal the direction"
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Sample prompts whose combinations were never trained on and read them back from the pixels.

    Example: frameloom data score runs/demo/denoiser
    """
    from frameloom.demo.shapes_score import score_from_first_frames, score_run
    from frameloom.sampling.load import load_model

    measure = score_from_first_frames if from_first_frame else score_run
    scored = measure(load_model(run, context.args, step=step), num_prompts=count, seed=seed)
    if as_json:
        print(json.dumps(scored.to_json(), indent=2))
        return
    print(f"{scored.count} held-out prompts")
    for name, share in scored.accuracy.items():
        print(f"  {name:<12}{share:>6.1%}   by chance {scored.chance[name]:.1%}")
    print(f"  {'all right':<12}{scored.all_right:>6.1%}")
    if scored.first_frame_db is not None:
        print(f"  first frame {scored.first_frame_db:.1f} dB like the given one, in the median")
