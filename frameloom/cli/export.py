"""Commands that export a model for other programs, and convert weights between files and layouts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from frameloom.core.units import parse_bytes


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
    out: Annotated[Path | None, typer.Argument(help="new folder to write; default: RUN/exports/FORM")] = None,
    to: Annotated[To, typer.Option(help="diffusers folders, one file, LoRA files, or the original system's keys")] = (
        To.diffusers
    ),
    weights: Annotated[Weights | None, typer.Option(help="averaged or last weights; default: averaged if any")] = None,
    step: Annotated[int | None, typer.Option(help="a checkpoint other than the newest")] = None,
    dtype: Annotated[Format, typer.Option(help="dtype of the trained weights")] = Format.keep,
    shard_size: Annotated[str, typer.Option(help="largest file, such as 5GB or 500MB")] = "5GB",
    prompt: Annotated[list[str] | None, typer.Option(help="draw a sample for the card; may be repeated")] = None,
    seed: Annotated[int, typer.Option(help="seed of the first of these samples")] = 0,
    force: Annotated[bool, typer.Option("--force", help="replace an existing export")] = False,
) -> None:
    """Write weights and a model card with recipe, data, metrics and samples.

    Example: frameloom export runs/my-run --to diffusers my-model

    Example: frameloom export runs/my-lora --to lora --weights raw

    Example: frameloom export runs/my-run --to single-file --dtype bf16 --prompt "a red circle"
    """
    from frameloom.interop.export.export import Export, export_run

    def draw(folder: Path) -> None:
        from frameloom.sampling.load import load_model
        from frameloom.sampling.outputs import write_samples

        chosen = ["--sample.weights", weights.value] if weights else []
        write_samples(load_model(run, chosen, step=step).sample(prompt or [], seed=seed, batch_size=16), folder)

    task = Export(
        run=run,
        to=to.value,
        out=out,
        weights=weights.value if weights else None,
        step=step,
        dtype=dtype.value,
        shard_bytes=parse_bytes(shard_size, where="--shard-size", needs_unit=False),
        force=force,
        draw=draw if prompt else None,
    )
    done = export_run(task)
    for name, digest in done.files.items():
        print(f"sha256 {digest}  {name}")
    print(f"done: {done.out}")
    print(f"how to open it: {done.out / 'README.md'}")


class ConvertTo(StrEnum):
    auto = "auto"
    single = "single"
    sharded = "sharded"
    model = "model"
    pipeline = "pipeline"


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="file, index or folder of weights; .bin, .ckpt and so on")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="a new .safetensors file or folder")],
    to: Annotated[
        ConvertTo, typer.Option(help="one file, shards, a model folder of Frameloom, or an SDXL pipeline")
    ] = ConvertTo.auto,
    shard_size: Annotated[str, typer.Option(help="largest shard, such as 5GB or 500MB")] = "5GB",
    dtype: Annotated[Format, typer.Option(help="dtype of floating-point tensors")] = Format.keep,
    section: Annotated[str, typer.Option(help="table of a .ckpt to take, such as ema_state_dict")] = "",
    strip_prefix: Annotated[list[str] | None, typer.Option(help="take this off the names; may be repeated")] = None,
    family: Annotated[str, typer.Option(help="model family whose keys these are, such as wfvae")] = "",
    size: Annotated[str, typer.Option(help="size of that family, when no config.json is beside IN")] = "",
    layout: Annotated[str, typer.Option(help="published layout of the family to write")] = "",
    config: Annotated[Path | None, typer.Option(help="folder with tokenizers and config files for a pipeline")] = None,
    copy_tied: Annotated[bool, typer.Option("--copy-tied", help="write tied tensors as copies, not by name")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace OUT")] = False,
) -> None:
    """Convert weights: pickles to safetensors, shards to one file and back, dtypes, published layouts.

    Reads and writes one tensor at a time. A pickle is opened with weights-only loading, and refused if it needs more.

    Example: frameloom convert mt5-xxl/pytorch_model.bin mt5-xxl/model.safetensors

    Example: frameloom convert any93x640x640/ merged.safetensors

    Example: frameloom convert merged.safetensors shards/ --shard-size 2GB --dtype bf16

    Example: frameloom convert vae/merged.ckpt wfvae/ --family wfvae --section ema_state_dict

    Example: frameloom convert sd_xl_base_1.0.safetensors sdxl/ --to pipeline --config sdxl-configs/

    Example: frameloom convert sdxl/ whole.safetensors

    Example: frameloom convert flux1-dev.safetensors flux/ --family opensora2 --size flux-dev --layout diffusers
    """
    from frameloom.interop.convert.convert import Conversion, convert_weights

    task = Conversion(
        source=source,
        out=out,
        to=to.value,
        shard_bytes=parse_bytes(shard_size, where="--shard-size", needs_unit=False),
        dtype=dtype.value,
        section=section,
        prefixes=tuple(strip_prefix or ()),
        family=family,
        size=size,
        layout=layout,
        config=config,
        copy_tied=copy_tied,
        force=force,
    )
    for line in convert_weights(task).format_lines():
        print(line)
