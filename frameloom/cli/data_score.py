"""Score a run on held-out prompts of Moving Shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def score(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="a denoiser run that was trained on Moving Shapes")],
    count: Annotated[int, typer.Option(help="number of prompts", min=1)] = 108,
    seed: Annotated[int, typer.Option(help="which prompts")] = 1,
    step: Annotated[int | None, typer.Option(help="score this checkpoint; default: the newest")] = None,
    from_first_frame: Annotated[
        bool,
        typer.Option(
            "--from-first-frame", help="image to video: give a first frame as well, which does not tell the direction"
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Sample prompts whose combinations were never trained on and read them back from the pixels.

    Example: frameloom data score runs/demo/denoiser
    """
    from frameloom.generate.load import load_sampler
    from frameloom.generate.score import score_from_first_frames, score_run

    measure = score_from_first_frames if from_first_frame else score_run
    scored = measure(load_sampler(run, context.args, step=step), num_prompts=count, seed=seed)
    if as_json:
        print(json.dumps(scored.to_json(), indent=2))
        return
    report = scored.report
    print(f"{report.count} held-out prompts")
    for name, share in report.accuracy.items():
        print(f"  {name:<12}{share:>6.1%}   by chance {report.chance[name]:.1%}")
    print(f"  {'all right':<12}{report.all_right:>6.1%}")
    if scored.first_frame_db is not None:
        print(f"  first frame {scored.first_frame_db:.1f} dB like the given one, in the median")
