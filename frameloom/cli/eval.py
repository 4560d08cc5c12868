"""Compare generated clips with reference clips: PSNR, SSIM, MS-SSIM, LPIPS, Fréchet distance."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.vae_options import AsJson, Device, Frames, Height, SampleRate, ShortSide, Width
from frameloom.core.errors import ConfigError


class Pairs(StrEnum):
    name = "name"
    order = "order"
    none = "none"


def evaluate_clips(
    generated: Annotated[Path, typer.Argument(help="a video or image, a folder of them, a csv or manifest")],
    reference: Annotated[Path, typer.Argument(help="what GENERATED is measured against, of the same kinds")],
    pairs: Annotated[
        Pairs, typer.Option(help="which clips belong together: same name, same place in the list, or none do")
    ] = Pairs.name,
    metrics: Annotated[
        str | None, typer.Option(help="of psnr, ssim, ms-ssim, lpips, with commas; default: all that can be told")
    ] = None,
    lpips: Annotated[Path | None, typer.Option(help="LPIPS weights: VGG16 and linear heads (.safetensors)")] = None,
    features: Annotated[
        list[Path] | None,
        typer.Option(help="for FVD: features of GENERATED, then again of REFERENCE (.npy, .safetensors, or a folder)"),
    ] = None,
    pixels: Annotated[
        bool, typer.Option("--frechet-pixels", help="Fréchet distance of coarse thumbnails; no FVD, for a quick look")
    ] = False,
    frames: Frames = None,
    sample_rate: SampleRate = 1,
    height: Height = None,
    width: Width = None,
    short_side: ShortSide = None,
    confidence: Annotated[float, typer.Option(help="of the intervals")] = 0.95,
    out: Annotated[Path | None, typer.Option(help="folder for metrics.parquet and metrics.json")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the metrics of an earlier call")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure GENERATED against REFERENCE, clip by clip, and tell means with confidence intervals.

    Pairs that cannot be read, or differ in size or length, are listed, and the rest goes on. FVD is the Fréchet
    distance of features: compute one vector per clip with the network of your choice, and give both sides.

    Example: frameloom eval samples/ clips/ --frames 17 --height 256 --width 256 --out report/

    Example: frameloom eval samples/ clips/ --pairs none --features ours.npy --features theirs.npy
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"--confidence {confidence:g}: choose a number between 0 and 1, such as 0.95")
    if features is not None and len(features) != 2:
        raise ConfigError(
            f"--features is given {len(features)} time(s); give it twice: --features OURS --features THEIRS"
        )
    from frameloom.data.clip_view import ClipView, list_clips
    from frameloom.evaluate.comparison import compare_sets, pair_clips
    from frameloom.evaluate.measures import Measures, build_measures
    from frameloom.evaluate.metric_table import refuse_existing_metrics
    from frameloom.generate.parts import pick_device

    if out is not None:
        refuse_existing_metrics(out, force=force)
    view = ClipView(frames, sample_rate, height, width, short_side)
    place = pick_device(device)
    names = None if metrics is None else [name.strip() for name in metrics.split(",") if name.strip()]
    if pairs is Pairs.none:
        if names:
            raise ConfigError("--metrics are of pairs; leave --pairs none out, or ask for --features only")
        measures = Measures({})
    else:
        measures = build_measures(names, lpips=lpips, device=place)
    clips = pair_clips(list_clips(generated), list_clips(reference), pairs.value)
    given = None if features is None else (features[0], features[1])
    table = compare_sets(clips, measures, view=view, with_pixels=pixels, features=given, confidence=confidence)
    table.refuse_empty()
    if out is not None:
        table.write(out)
    for line in [json.dumps(table.to_json(), indent=2)] if as_json else table.describe():
        print(line)
