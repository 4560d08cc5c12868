"""Make videos from prompts with a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sample(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="a run folder of `frameloom train`, finished or still running")],
    prompt: Annotated[list[str] | None, typer.Option(help="what to show; may be given several times")] = None,
    prompts: Annotated[Path | None, typer.Option(help="a text file with one prompt per line")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the files; default: RUN/samples")] = None,
    seed: Annotated[int, typer.Option(help="seed of the first video; each further one counts up")] = 0,
    steps: Annotated[int | None, typer.Option(help="solver steps")] = None,
    guidance: Annotated[float | None, typer.Option(help="classifier-free guidance scale; 1 switches it off")] = None,
    weights: Annotated[str | None, typer.Option(help="ema (averaged) or raw (last)")] = None,
) -> None:
    """Write one mp4 per prompt and a contact sheet; other settings follow with dots.

    Example: frameloom sample runs/demo/denoiser --prompt "a red circle moves left slowly over a gray background"

    Example: frameloom sample runs/cats --prompts prompts.txt --guidance 5 --sample.frames 17
    """
    from frameloom.generate.prompts import read_prompts

    texts = read_prompts(prompt or [], prompts)
    flags = {"steps": steps, "guidance": guidance, "weights": weights}
    chosen = [part for name, value in flags.items() if value is not None for part in (f"--sample.{name}", str(value))]
    from frameloom.generate.load import load_sampler
    from frameloom.generate.prompts import sample_to_files

    sampler = load_sampler(run, [*chosen, *context.args])
    folder = out or run / "samples"
    for path in sample_to_files(sampler, texts, first_seed=seed, out=folder):
        print(path)
    print(folder / "contact-sheet.png")
