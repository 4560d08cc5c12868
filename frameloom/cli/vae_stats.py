"""Measure the latents of a set: mean and deviation per channel, and the scale to use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.outputs import check_output_file
from frameloom.cli.vae_options import (
    AsJson,
    ChunkFrames,
    Device,
    Frames,
    Height,
    Name,
    Precision,
    PrecisionOption,
    Root,
    SampleRate,
    Setting,
    ShortSide,
    Size,
    TileOverlap,
    TilePx,
    Width,
    open_vae,
)


def stats(
    vae: Annotated[Path, typer.Argument(metavar="VAE", help="a run, a model folder, or published weights")],
    manifest: Annotated[Path, typer.Argument(help="a video, a folder, or any list of clips that frameloom reads")],
    name: Name = None,
    size: Size = None,
    setting: Setting = None,
    frames: Frames = None,
    sample_rate: SampleRate = 1,
    height: Height = None,
    width: Width = None,
    short_side: ShortSide = None,
    chunk_frames: ChunkFrames = None,
    tile_px: TilePx = None,
    tile_overlap: TileOverlap = 0.25,
    precision: PrecisionOption = Precision.fp32,
    limit: Annotated[int | None, typer.Option(min=1, help="take this many clips, drawn from the set")] = None,
    seed: Annotated[int, typer.Option(help="which clips --limit draws")] = 0,
    out: Annotated[Path | None, typer.Option(help="also write the JSON to this file")] = None,
    root: Root = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Encode the clips of MANIFEST with VAE and tell the statistics of the latents, as a denoiser would see them.

    `scale` alone gives all latents together a mean square of 1; scale and shift per channel give each channel mean 0
    and deviation 1. Either goes into vae.overrides of a recipe.

    Example: frameloom vae stats runs/my-vae clips/manifest.parquet --frames 33 --short-side 256 --limit 500
    """
    from frameloom.core.files import write_json
    from frameloom.data.clip_view import ClipView, list_clips
    from frameloom.generate.latent_report import describe_statistics, draw_clips, report_statistics
    from frameloom.generate.reconstruct import measure_latents

    if out is not None:
        check_output_file(out, source=manifest)
    view = ClipView(frames, sample_rate, height, width, short_side)
    clips = draw_clips(list_clips(manifest, root=root), limit, seed)
    model = open_vae(
        vae,
        name,
        size,
        setting,
        chunk_frames=chunk_frames,
        tile_px=tile_px,
        tile_overlap=tile_overlap,
        precision=precision,
        device=device,
    )
    found, bad = measure_latents(model, clips, view)
    report = report_statistics(found, bad, num_clips=len(clips) - len(bad), now=model)
    if out is not None:
        write_json(out, report)
    for line in [json.dumps(report, indent=2)] if as_json else describe_statistics(report):
        print(line)
