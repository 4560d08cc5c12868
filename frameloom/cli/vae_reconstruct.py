"""Send clips through an autoencoder and back, and measure what was lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from frameloom.cli.outputs import check_output_folder
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


def reconstruct(
    source: Annotated[Path, typer.Argument(metavar="IN", help="a video or image, a folder of them, a csv or manifest")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder for the results and metrics.json")],
    vae: Annotated[
        Path | None, typer.Option("--vae", "--weights", help="a run, a model folder, or published weights")
    ] = None,
    name: Name = None,
    size: Size = None,
    setting: Setting = None,
    frames: Frames = None,
    sample_rate: SampleRate = 1,
    fps: Annotated[float | None, typer.Option(help="frame rate of the results; default: that of the frames")] = None,
    height: Height = None,
    width: Width = None,
    short_side: ShortSide = None,
    chunk_frames: ChunkFrames = None,
    tile_px: TilePx = None,
    tile_overlap: TileOverlap = 0.25,
    precision: PrecisionOption = Precision.fp32,
    grid: Annotated[bool, typer.Option("--grid", help="original and reconstruction side by side")] = False,
    seed: Annotated[int | None, typer.Option(help="sample latents with this seed instead of taking the mean")] = None,
    lpips: Annotated[Path | None, typer.Option(help="LPIPS weights (.safetensors); adds that metric")] = None,
    root: Root = None,
    device: Device = "auto",
    force: Annotated[bool, typer.Option("--force", help="replace results of an earlier call")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the reconstruction of each clip of IN to OUT, with PSNR, SSIM and MS-SSIM in metrics.parquet and .json.

    A clip that cannot be read is listed, and the rest goes on. Several processes share the work:
    torchrun --nproc-per-node 8 -m frameloom vae reconstruct clips/ out/ --vae runs/my-vae

    Example: frameloom vae reconstruct clips/ out/ --vae runs/my-vae --grid --frames 65 --short-side 256

    Example: frameloom vae reconstruct a.mp4 out/ --weights wfvae.safetensors --name wfvae --size 8ch --chunk-frames 32
    """
    from frameloom.core.ranks import read_ranks
    from frameloom.data.clip_view import ClipView, list_clips
    from frameloom.evaluate.measures import build_measures
    from frameloom.evaluate.metric_table import MetricTable
    from frameloom.generate.reconstruct import Reconstruction, check_view, reconstruct_files

    check_output_folder(out, "OUT")
    ranks = read_ranks()
    view = ClipView(frames, sample_rate, height, width, short_side)
    clips = list_clips(source, root=root)
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
        local_rank=ranks.local_rank,
    )
    check_view(model, view)
    measures = build_measures(None, lpips=lpips, device=next(model.parameters()).device)
    options = Reconstruction(view, fps, grid, seed, force)
    records = reconstruct_files(model, clips, out, options, measure=measures, ranks=ranks)
    if records is None:
        return
    table = MetricTable(records, measures.columns)
    table.refuse_empty()
    table.write(out)
    if as_json:
        print(json.dumps(table.to_json(), indent=2))
        return
    for line in table.describe():
        print(line)
    print(f"{out}: {len(table.good)} results, metrics.parquet and metrics.json")
