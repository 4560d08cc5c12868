"""Take the model of a run away, for other programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class To(StrEnum):
    diffusers = "diffusers"
    single_file = "single-file"
    lora = "lora"
    original = "original"


class Weights(StrEnum):
    ema = "ema"
    raw = "raw"


class Format(StrEnum):
    keep = "keep"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def export(
    run: Annotated[Path, typer.Argument(help="a run folder of `frameloom train`, finished or still running")],
    out: Annotated[
        Path | None, typer.Argument(help="folder to write, not there yet; default: RUN/exports/FORM")
    ] = None,
    to: Annotated[To, typer.Option(help="diffusers folders, one file, LoRA files, or the original system's keys")] = (
        To.diffusers
    ),
    weights: Annotated[Weights | None, typer.Option(help="averaged or last weights; default: averaged if any")] = None,
    step: Annotated[int | None, typer.Option(help="a checkpoint other than the newest")] = None,
    dtype: Annotated[Format, typer.Option(help="number format of the trained weights")] = Format.keep,
    shard_size: Annotated[str, typer.Option(help="largest file, such as 5GB or 500MB")] = "5GB",
    prompt: Annotated[list[str] | None, typer.Option(help="draw a sample for the card; may be repeated")] = None,
    seed: Annotated[int, typer.Option(help="seed of the first of these samples")] = 0,
    force: Annotated[bool, typer.Option("--force", help="replace an export that is there")] = False,
) -> None:
    """Write weights and a model card with recipe, data, metrics and samples.

    Example: frameloom export runs/my-run --to diffusers my-model

    Example: frameloom export runs/my-lora --to lora --weights raw

    Example: frameloom export runs/my-run --to single-file --dtype bf16 --prompt "a red circle"
    """
    from frameloom.checkpoint.conversion_target import parse_size
    from frameloom.generate.export import Export, export_run

    def draw(folder: Path) -> None:
        from frameloom.generate.load import load_sampler
        from frameloom.generate.pipeline import Request, generate, write_results

        chosen = ["--sample.weights", weights.value] if weights else []
        sampler = load_sampler(run, chosen, step=step)
        requests = [Request(text, seed + index) for index, text in enumerate(prompt or [])]
        write_results(sampler, generate(sampler, requests), folder)

    task = Export(
        run=run,
        to=to.value,
        out=out,
        weights=weights.value if weights else None,
        step=step,
        dtype=dtype.value,
        shard_bytes=parse_size(shard_size),
        force=force,
        draw=draw if prompt else None,
    )
    done = export_run(task)
    for name, digest in done.files.items():
        print(f"sha256 {digest}  {name}")
    print(f"done: {done.out}")
    print(f"how to open it: {done.out / 'README.md'}")
